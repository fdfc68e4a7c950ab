"""The same rows for all members of a data-parallel group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.sampler.planned import Draw, PlannedSampler, rank_and_batch

__all__ = ["RankAwareSampler"]


class RankAwareSampler(PlannedSampler):
    """The first request for a (partition, task, ``dp_rank``, ``batch_index``) takes the next ready rows, every later
    one gets the same rows: processes that share a rank see identical batches, different ranks disjoint ones."""

    def offered(self, ready_indexes: Sequence[int]) -> list[int]:
        return list(ready_indexes)

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        rank, batch = rank_and_batch(params, required=True)
        return Draw(batch_size, 1, rank, batch)
