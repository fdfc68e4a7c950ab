"""The control plane as a pure state machine: no sockets, no clock, no torch."""
