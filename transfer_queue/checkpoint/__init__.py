"""Checkpoints of a whole queue: rows, data, tags, keys and their order, and what each task has consumed."""

from transfer_queue.checkpoint.load import load_checkpoint
from transfer_queue.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
