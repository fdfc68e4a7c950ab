"""Rows in the order of their indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.sampler.planned import Draw, PlannedSampler

__all__ = ["SequentialSampler"]


class SequentialSampler(PlannedSampler):
    """Returns the first ready rows, all consumed. `sample` of a plain list keeps its order, and returns fewer rows if
    the list is shorter; a controller offers rows by rising index, and waits for enough rows."""

    config_keys = ()

    def offered(self, ready_indexes: Sequence[int]) -> list[int]:
        return list(ready_indexes)

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        rows = ready[: draw.rows]
        return rows, rows

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        return Draw(batch_size)
