"""Benchmarks of TransferQueue against its peers, in turn, in one run: ``python -m bench``."""
