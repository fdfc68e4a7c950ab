"""A journal on disk: batches of bytes, appended in order and read back after a crash, whatever they mean."""

from transfer_queue.journal.journal import Journal, Recovered

__all__ = ["Journal", "Recovered"]
