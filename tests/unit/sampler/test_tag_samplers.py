"""The samplers that go by tags, called directly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.sampler import (
    BaseSampler,
    PrioritySampler,
    ReplaySampler,
    SeqlenBalancedSampler,
    TokenBudgetSampler,
)


class Tags:
    def __init__(self, tags: dict[int, dict[str, Any]]) -> None:
        self.tags = tags

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: self.tags.get(index, {}) for index in indexes}


def lengths(*tokens: float) -> Tags:
    return Tags({index: {"total_lengths": count} for index, count in enumerate(tokens)})


def ask(sampler: BaseSampler, tags: Tags, size: int, **params: Any) -> tuple[list[int], list[int]]:
    return sampler.sample(list(range(len(tags.tags))), size, partition=tags, **params)


def test_budget_takes_rows_in_order_until_one_does_not_fit() -> None:
    assert ask(TokenBudgetSampler(10), lengths(4, 5, 3, 1), 8) == ([0, 1], [0, 1])
    assert ask(TokenBudgetSampler(10), lengths(4, 5, 3, 1), 8, token_budget=12)[0] == [0, 1, 2]
    assert ask(TokenBudgetSampler(10), lengths(1, 1, 1), 2)[0] == [0, 1]


def test_budget_that_is_not_used_up_waits_unless_flushed() -> None:
    assert ask(TokenBudgetSampler(10), lengths(4, 5), 8) == ([], [])
    assert ask(TokenBudgetSampler(10), lengths(4, 5), 8, flush=True)[0] == [0, 1]
    assert ask(TokenBudgetSampler(9), lengths(4, 5), 8)[0] == [0, 1]


def test_a_row_beyond_the_budget_goes_alone() -> None:
    assert ask(TokenBudgetSampler(10), lengths(40, 5), 8)[0] == [0]


@given(
    tokens=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    group=st.integers(1, 3),
    size=st.integers(1, 6),
    flush=st.booleans(),
)
def test_micro_batches_of_all_ranks_keep_to_the_budget(
    tokens: list[int], ranks: int, group: int, size: int, flush: bool
) -> None:
    sampler = TokenBudgetSampler(40, ranks, group)
    tags = lengths(*tokens)
    shares = [
        ask(sampler, tags, size * group, dp_rank=rank, batch_index=0, flush=flush, partition_id="p", task_name="t")[0]
        for rank in range(ranks)
    ]
    taken = [row for share in shares for row in share]
    assert sorted(taken) == list(range(len(taken)))  # the lowest ones, each once
    assert all(shares) or not taken
    for share in shares:
        assert len(share) % group == 0
        assert len(share) <= size * group
        assert sum(tokens[row] for row in share) <= 40 or len(share) == group
    if flush:
        assert taken or len(tokens) < ranks * group


def test_priorities_come_first_and_equals_by_index() -> None:
    tags = Tags({0: {"priority": 1}, 1: {"priority": 2.5}, 2: {}, 3: {"priority": 2.5}, 4: {"priority": -1}})
    assert ask(PrioritySampler(), tags, 4) == ([1, 3, 0, 2], [1, 3, 0, 2])


def test_rows_outside_the_window_are_given_up() -> None:
    tags = Tags({0: {"version": 3}, 1: {"version": 5}, 2: {"version": 4}, 3: {}})
    assert ask(PrioritySampler(max_staleness=1), tags, 2, version=5) == ([1, 2], [1, 2, 0, 3])
    assert ask(PrioritySampler(max_staleness=1), tags, 3, version=5) == ([], [0, 3])
    assert ask(PrioritySampler(max_staleness=0), tags, 1, version=5)[0] == [1]


def test_replay_goes_by_weight_and_consumes_nothing() -> None:
    tags = Tags({0: {"weight": 3}, 1: {"weight": 0}, 2: {"weight": 1}})
    sampled, consumed = ask(ReplaySampler(), tags, 4000)
    counts = Counter(sampled)
    assert consumed == []
    assert counts[1] == 0
    assert 0.7 < counts[0] / 4000 < 0.8


def test_replay_repeats_with_its_seed_and_resumes_from_a_checkpoint() -> None:
    tags = Tags({index: {} for index in range(50)})
    first, second = ReplaySampler(seed=3), ReplaySampler(seed=3)
    assert ask(first, tags, 20) == ask(second, tags, 20)
    assert ask(first, tags, 20, seed=9) == ask(ReplaySampler(seed=1), tags, 20, seed=9)
    assert ask(first, tags, 20) != ask(first, tags, 20)
    resumed = ReplaySampler(seed=3)
    resumed.load_checkpoint(first.save_checkpoint())
    assert ask(resumed, tags, 20) == ask(first, tags, 20)


def test_replay_waits_for_its_minimum() -> None:
    assert ask(ReplaySampler(min_rows=3), Tags({0: {}, 1: {}}), 5) == ([], [])
    assert ask(ReplaySampler(), Tags({0: {"weight": 0}}), 5) == ([], [])


@pytest.mark.parametrize(
    ("sampler", "tags", "params", "message"),
    [
        (TokenBudgetSampler(5), lengths(-1), {}, "total_lengths"),
        (TokenBudgetSampler(5), lengths(float("nan")), {}, "total_lengths"),
        (SeqlenBalancedSampler(1, 2), lengths(float("nan"), 1), {}, r"not nan \(row 0\)"),
        (SeqlenBalancedSampler(1, 2), lengths(float("inf"), 1), {}, r"not inf \(row 0\)"),
        (SeqlenBalancedSampler(1, 2), Tags({0: {"total_lengths": 10**400}, 1: {}}), {}, "total_lengths"),
        (TokenBudgetSampler(5), lengths(1), {"flush": "yes"}, "flush"),
        (TokenBudgetSampler(5), lengths(1), {"token_budget": 0}, "token_budget must be positive"),
        (TokenBudgetSampler(5, 2), lengths(1), {"dp_rank": 2}, "less than dp_size"),
        (TokenBudgetSampler(5, 1, 2), lengths(1), {}, "multiple of n_samples_per_prompt"),
        (PrioritySampler(2), lengths(1), {}, "version"),
        (PrioritySampler(2), lengths(1), {"version": "new"}, "version"),
        (PrioritySampler(), Tags({0: {"priority": "high"}}), {}, "finite"),
        (PrioritySampler(), Tags({0: {"priority": 10**400}}), {}, "finite"),
        (ReplaySampler(), Tags({0: {"weight": -1}}), {}, "weight"),
        (ReplaySampler(), lengths(1), {"seed": "x"}, "seed"),
    ],
)
def test_what_makes_no_sense_is_refused(sampler: BaseSampler, tags: Tags, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(sampler, tags, 1, **params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBudgetSampler(0), "token_budget must be positive"),
        (lambda: TokenBudgetSampler(True), "token_budget must be positive"),
        (lambda: TokenBudgetSampler(1, 0), "dp_size must be positive"),
        (lambda: TokenBudgetSampler(1, 1, 0), "n_samples_per_prompt must be positive"),
        (lambda: PrioritySampler(-1), "max_staleness"),
        (lambda: PrioritySampler(1, ""), "priority_tag"),
        (lambda: ReplaySampler(""), "weight_tag"),
        (lambda: ReplaySampler(min_rows=0), "min_rows must be positive"),
        (lambda: ReplaySampler(seed=1.5), "seed"),  # type: ignore[arg-type]
    ],
)
def test_wrong_constructor_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_rank_gets_as_many_rows_however_long_they_are() -> None:
    shares = SeqlenBalancedSampler(dp_size=2).share([4, 5, 6, 7], 2, [100.0, 1.0, 1.0, 1.0])
    assert [len(share) for share in shares] == [2, 2]
    assert {row for share in shares for row in share} == {4, 5, 6, 7}


def test_a_draw_by_priority_is_for_the_rank_that_asks_alone() -> None:
    assert PrioritySampler().plan(4, {"dp_rank": 1, "batch_index": 0})[:4] == (4, 1, 1, 0)
