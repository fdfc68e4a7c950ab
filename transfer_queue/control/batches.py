"""Replies that carry rows."""

from __future__ import annotations

import numpy as np

from transfer_queue.control.arrays import Rows, row_count
from transfer_queue.control.column_groups import Selection
from transfer_queue.control.commands import Batch
from transfer_queue.control.partition import Partition

__all__ = ["EMPTY_BATCH", "make_batch"]

EMPTY_BATCH = Batch(b"")


def make_batch(partition: Partition, rows: Rows, selection: Selection, *, locate: bool, ready: bool = True) -> Batch:
    """``ready``: it is known that all rows have all fields. Else the status says which have."""
    n = row_count(rows)
    locations, schemas = selection.locate(rows, partition.base, partition.blocks)
    lengths = partition.fields.read_lengths(selection.names, rows) if partition.fields.lengths else {}
    status = b"\x01" * n if ready else row_status(selection, rows)
    return Batch(
        partition.encode(rows),
        schemas,
        status,
        partition.tags_at(rows),
        partition.keys_at(rows),
        locations if locate else [],
        lengths,
    )


def row_status(selection: Selection, rows: Rows) -> bytes:
    """int8 bytes, a row each: has all the fields."""
    n = row_count(rows)
    if selection.unknown or not selection.column_groups:
        return bytes(n)
    status = np.ones(n, np.bool_)
    for column_group in selection.column_groups:
        status &= column_group.slot.array[rows] > 0
    return status.tobytes()
