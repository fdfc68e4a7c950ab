"""Whole groups of samples of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.sampler.planned import Draw, PlannedSampler, check_groups, check_positive, rank_and_batch

__all__ = ["GRPOGroupNSampler"]


class GRPOGroupNSampler(PlannedSampler):
    """Only complete groups of ``n_samples_per_prompt`` consecutive rows, lowest first.

    In a controller the groups are rows 0 to n-1, n to 2n-1, … of the partition in order of creation. With ``dp_rank``
    and ``batch_index`` in the sampling config, a repeat of both returns the same rows.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        self.n_samples_per_prompt = check_positive("n_samples_per_prompt", n_samples_per_prompt)
        self.group = n_samples_per_prompt

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        check_groups(batch_size, self.group)
        rank, batch = rank_and_batch(params, required=False)
        return Draw(batch_size, 1, rank, batch)
