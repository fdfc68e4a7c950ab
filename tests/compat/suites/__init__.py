"""The clients' own tests, with this library and with a release of 0.1.x beside it: ``make compat``."""
