"""A journal on disk: batches of bytes, appended in order and read back after a crash. It does not interpret them."""

from transfer_queue.journal.journal import Journal, Recovered

__all__ = ["Journal", "Recovered"]
