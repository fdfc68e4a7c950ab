"""Rows in the order of their indexes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.sampler.planned import Draw, PlannedSampler

__all__ = ["SequentialSampler"]


class SequentialSampler(PlannedSampler):
    """The lowest ready rows, all consumed."""

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        return Draw(batch_size)
