"""Batches that cost all ranks about the same."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.planned import Draw, check_positive, rank_and_batch

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]


class UnequalPartsError(InvalidInputError, AssertionError):
    """The sequences cannot be divided as requested; an AssertionError in 0.1.x."""


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Draws ``batch_size`` rows for each of ``dp_size`` ranks at once and deals whole groups, equally many to each,
    so that the sums of the tag ``total_lengths`` are close. Every rank must ask for every batch; repeats are identical.

    Sampling config: ``dp_rank`` (default 0), ``batch_index`` (default 0).
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.dp_size = check_positive("dp_size", dp_size)

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        rank, batch = rank_and_batch(
            {"dp_rank": params.get("dp_rank", 0), "batch_index": params.get("batch_index", 0)}, required=True
        )
        if rank >= self.dp_size:
            raise InvalidInputError(f"dp_rank must be less than dp_size ({self.dp_size}); got {rank}")
        rows = super().plan(batch_size, {}).rows
        return Draw(rows * self.dp_size, self.dp_size, rank, batch)

    def has_rank(self, params: Mapping[str, Any]) -> bool:
        rank = params.get("dp_rank", 0)
        return not isinstance(rank, int) or rank < self.dp_size

    def share(self, rows: list[int], ranks: int, lengths: Sequence[float]) -> list[list[int]]:
        n = self.group
        costs = [sum(lengths[first : first + n]) for first in range(0, len(rows), n)]
        return [
            [row for group in groups for row in rows[group * n : (group + 1) * n]]
            for groups in get_seqlen_balanced_partitions(costs, ranks, equal_size=True)
        ]


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Positions of ``seqlen_list`` in ``k_partitions`` parts of nearly equal sums, by the largest differencing method
    (Karmarkar and Karp 1982). ``equal_size``: parts of equally many items; UnequalPartsError if their number does not
    divide.
    """
    wrong = next((length for length in seqlen_list if not -math.inf < length < math.inf), None)
    if wrong is not None:
        raise InvalidInputError(f"lengths of sequences must be finite numbers, not {wrong!r}")
    order = sorted(range(len(seqlen_list)), key=lambda position: (seqlen_list[position], position))
    if equal_size:
        if len(order) % k_partitions:
            raise UnequalPartsError(f"{len(order)} sequences do not divide into {k_partitions} parts of equal size")
        seeds = [order[first : first + k_partitions] for first in range(0, len(order), k_partitions)]
    else:
        seeds = [[position] for position in order]
    # A state is k parts as (sum, members), largest sum first. The two states whose parts differ most are merged,
    # the largest part of the one with the smallest of the other, until one is left. Every seed of the equal-size
    # case gives each part one item, so that merging keeps the parts equally large.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, seed in enumerate(seeds):
        parts = [(seqlen_list[position], [position]) for position in seed]
        parts += [(0, []) for _ in range(k_partitions - len(seed))]
        parts.sort(key=lambda part: -part[0])
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(k_partitions)]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Like `karmarkar_karp`, with ascending members. Raises UnequalPartsError for fewer sequences than parts."""
    if len(seqlen_list) < k_partitions:
        raise UnequalPartsError(f"cannot divide {len(seqlen_list)} sequences into {k_partitions} parts")
    return [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
