"""Blocks in the memory of storage units: shared memory on the same host, TCP elsewhere."""
