"""Checkpoints of a whole queue: rows, data, tags, keys and their order, and what each task has consumed. Also some rows
of a queue, by their keys, as files."""

from transfer_queue.checkpoint.dump import dump_data_by_key, load_data_by_key, read_row_index
from transfer_queue.checkpoint.load import load_checkpoint
from transfer_queue.checkpoint.save import save_checkpoint

__all__ = ["dump_data_by_key", "load_checkpoint", "load_data_by_key", "read_row_index", "save_checkpoint"]
