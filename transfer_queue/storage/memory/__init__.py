"""The memory backend: blocks in shared memory of storage units."""
