"""The samplers called directly, as a user's controller or a test of one would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_queue.sampler.base as base
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions, karmarkar_karp


class Tags:
    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: {"total_lengths": self.lengths[index]} for index in indexes if index in self.lengths}


def ask(rank: int, batch: int = 0, **more: Any) -> dict[str, Any]:
    return {"dp_rank": rank, "batch_index": batch, "task_name": "t", "partition_id": "p", **more}


def test_base_sampler_is_abstract() -> None:
    assert base.BaseSampler is BaseSampler
    with pytest.raises(TypeError):
        BaseSampler()  # type: ignore[abstract]


def test_sequential_takes_the_first_in_their_order_and_consumes_them() -> None:
    assert SequentialSampler().sample([5, 3, 9, 4], 3) == ([5, 3, 9], [5, 3, 9])
    assert SequentialSampler()([1, 2], 3) == ([1, 2], [1, 2])
    assert RankAwareSampler().sample([5, 3, 9], 2, **ask(0)) == ([5, 3], [5, 3])


def test_groups_are_complete_runs_of_consecutive_rows() -> None:
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3)
    ready = [0, 1, 3, 4, 5, 7, 9, 10, 11]
    assert sampler.sample(ready, 6) == ([3, 4, 5, 9, 10, 11], [3, 4, 5, 9, 10, 11])
    assert sampler.sample(ready, 9) == ([], [])


def test_group_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        GRPOGroupNSampler(0)
    with pytest.raises(ValueError, match="must be a multiple of n_samples_per_prompt"):
        GRPOGroupNSampler(2).sample([0, 1, 2], 3)


def test_groups_repeat_for_a_rank_and_batch() -> None:
    sampler = GRPOGroupNSampler(2)
    assert sampler.sample([0, 1, 2, 3], 2, **ask(0))[0] == [0, 1]
    assert sampler.sample([2, 3], 2, **ask(0))[0] == [0, 1]
    assert sampler.sample([2, 3], 2, **ask(1))[0] == [2, 3]


def test_ranks_are_disjoint_and_members_of_a_rank_equal() -> None:
    sampler = RankAwareSampler()
    assert sampler.sample([0, 1, 2, 3], 2, **ask(0)) == ([0, 1], [0, 1])
    assert sampler.sample([2, 3], 2, **ask(1)) == ([2, 3], [2, 3])
    assert sampler.sample([], 2, **ask(0)) == ([0, 1], [0, 1])
    assert sampler.sample([4], 2, **ask(0, 1)) == ([], [])
    assert sampler.has_cached_result("p", "t", ask(0))
    assert not sampler.has_cached_result("p", "t", ask(0, 1))
    assert not sampler.has_cached_result("p", "other", ask(0))
    assert not sampler.has_cached_result("p", "t")
    sampler.clear_cache("p")
    assert not sampler.has_cached_result("p", "t", ask(0))
    sampler.clear_cache("p")


@pytest.mark.parametrize("params", [{}, {"dp_rank": -1, "batch_index": 0}, {"dp_rank": None, "batch_index": 0}])
def test_rank_aware_needs_a_rank(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        RankAwareSampler().sample([0], 1, **params)


def test_rank_aware_needs_a_batch_index() -> None:
    with pytest.raises(ValueError, match="batch_index"):
        RankAwareSampler().sample([0], 1, dp_rank=0)


def test_balanced_deals_all_ranks_at_once() -> None:
    sampler = SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    tags = Tags({0: 9, 1: 8, 2: 2})
    assert sampler.sample([0, 1, 2], 2, **ask(0, partition=tags)) == ([], [])
    first = sampler.sample([0, 1, 2, 3], 2, **ask(0, partition=tags))
    # a fast rank draws again before the slow one took its share: those rows are not up for sampling
    left = [index for index in range(6) if index not in first[1]]
    assert sampler.sample(left, 1, **ask(0, 1))[0] in ([4], [5])
    second = sampler.sample([0, 1, 2, 3], 2, **ask(1, partition=tags))
    assert sorted([sorted(first[0]), sorted(second[0])]) == [[0, 3], [1, 2]]
    assert first[0] == first[1]
    assert sampler.sample([], 2, **ask(1)) == second


def test_balanced_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="dp_size must be positive"):
        SeqlenBalancedSampler(dp_size=0)
    with pytest.raises(ValueError, match="less than dp_size"):
        SeqlenBalancedSampler(1, 2).plan(1, ask(2))
    assert SeqlenBalancedSampler(1, 2).sample([0, 1], 1, **ask(2)) == ([], [])
    with pytest.raises(AssertionError, match="do not divide"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
    assert issubclass(SeqlenBalancedSampler, GRPOGroupNSampler)


def test_checkpoint_carries_batches_and_promises() -> None:
    sampler = SeqlenBalancedSampler(1, 2)
    sampler.sample([0, 1], 1, **ask(0))
    other = SeqlenBalancedSampler(1, 2)
    other.load_checkpoint(sampler.save_checkpoint())
    assert other.sample([0, 1], 1, **ask(0)) == sampler.sample([0, 1], 1, **ask(0))
    assert other.sample([0, 1], 1, **ask(0, 1)) == ([], [])


@given(
    lengths=st.lists(st.integers(0, 10_000), min_size=1, max_size=60),
    parts=st.integers(1, 8),
    equal=st.booleans(),
)
def test_partition_uses_each_sequence_once(lengths: list[int], parts: int, equal: bool) -> None:
    lengths = lengths[: len(lengths) // parts * parts] if equal else lengths
    if len(lengths) < parts:
        with pytest.raises(ValueError, match="cannot divide"):
            get_seqlen_balanced_partitions(lengths, parts, equal)
        return
    found = get_seqlen_balanced_partitions(lengths, parts, equal)
    assert len(found) == parts
    assert sorted(position for part in found for position in part) == list(range(len(lengths)))
    sums = [sum(lengths[position] for position in part) for part in found]
    assert max(sums) - min(sums) <= max(lengths)
    if equal:
        assert {len(part) for part in found} == {len(lengths) // parts}


def test_differencing_beats_dealing_in_turn() -> None:
    found = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    sums = sorted(sum([8, 7, 6, 5, 4][position] for position in part) for part in found)
    assert sums == [14, 16]  # Karmarkar and Karp's own example
    with pytest.raises(ValueError, match="do not divide"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)
