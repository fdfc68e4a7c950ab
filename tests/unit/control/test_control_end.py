"""The end of a partition: what a producer says with its last put, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.control.build import Drained, fetch, i64, put, rows
from transfer_queue.compat.token_budget import StreamingTokenBudgetSampler
from transfer_queue.control import PARKED, ControlCore
from transfer_queue.control import commands as c
from transfer_queue.errors import InvalidInputError, SamplerError
from transfer_queue.sampler import GRPOGroupNSampler, SequentialSampler, TokenBudgetSampler


def tagged(count: int, *tokens: int, **more: Any) -> c.Commit:
    return put("p", count, "x", tags=[{"total_lengths": n} for n in tokens], **more)


def counts(core: ControlCore) -> Any:
    reply = core.apply(c.Snapshot("p"), 0)
    assert isinstance(reply, c.Value)
    return reply.value


def test_the_end_is_told_journaled_kept_and_goes_with_the_partition() -> None:
    core = ControlCore(journal=True)
    core.apply(put("p", 2, "x", block=1), 0)
    assert counts(core)["ended"] is False
    core.apply(put("p", 1, "", last=True), 0)
    assert (counts(core)["ended"], counts(core)["written"], counts(core)["rows"]) == (True, 2, 3)
    records = Drained(core).records
    again, loaded = ControlCore(), ControlCore()
    again.replay(records)
    loaded.restore(core.snapshot())
    for copy in (again, loaded):
        assert counts(copy) == counts(core)
    core.apply(c.Clear("p"), 0)
    core.apply(put("p", 1, "x", block=2), 0)
    assert counts(core)["ended"] is False


def test_the_rest_is_dealt_once_no_more_rows_come_and_some_ranks_may_get_nothing() -> None:
    core = ControlCore(sampler=TokenBudgetSampler(10, 2))
    ask = by_tokens(core)
    core.apply(tagged(1, 6), 0)
    assert ask(0, 0, 1) is PARKED
    core.apply(put("p", 2, "", tags=[{"total_lengths": 7}, {"total_lengths": 5}], last=True), 0)
    assert not Drained(core).answers  # the last rows have no data yet
    core.apply(put("p", i64(1), "x", block=2), 0)
    assert not Drained(core).by_request  # a row for each rank, but not a budget's worth
    core.apply(put("p", i64(2), "x", block=3), 0)
    assert rows(Drained(core).by_request[1]) == [1]
    assert rows(ask(1, 0, 2)) == [0]
    assert rows(ask(0, 1, 3)) == [2]
    assert rows(ask(1, 1, 4)) == []  # there is nothing for it in this batch, however long it waits
    assert rows(ask(0, 1, 5)) == [2]
    assert counts(core)["tasks"]["t"]["consumed"] == 3
    core.validate_state()


def test_the_rows_of_a_group_go_to_any_rank_and_no_micro_batch_exceeds_the_budget() -> None:
    core = ControlCore(sampler=StreamingTokenBudgetSampler(n_samples_per_prompt=2))
    ask = by_tokens(core)
    core.apply(tagged(1, 9), 0)
    assert ask(0, 0, 1) is PARKED  # half a group
    core.apply(put("p", 4, "x", block=2, tags=[{"total_lengths": n} for n in (9, 9, 9, 3)]), 0)
    assert rows(Drained(core).by_request[1]) == [0]
    assert [rows(ask(1, 0, 2)), rows(ask(1, 0, 3)), rows(ask(0, 1, 4))] == [[1], [1], [2]]
    assert rows(ask(1, 1, 5)) == [3]
    assert ask(1, 2, 6) is PARKED
    core.apply(put("p", i64(4), "", last=True), 0)
    assert rows(Drained(core).by_request[6]) == []  # the row left over went to the other rank, for good
    assert rows(ask(0, 2, 7)) == [4]
    assert counts(core)["tasks"]["t"]["consumed"] == 5
    core.validate_state()


def by_tokens(core: ControlCore) -> Any:
    def ask(rank: int, batch: int, request: int, timeout_s: float = 9.0) -> Any:
        command = fetch("p", "x", 0, timeout_s=timeout_s, token_budget=10, dp_size=2, dp_rank=rank, batch_index=batch)
        return core.apply(command, 0, request=request)

    return ask


def test_without_a_budget_the_number_of_rows_must_be_given() -> None:
    for sampler in (SequentialSampler(), GRPOGroupNSampler(2)):
        core = ControlCore(sampler=sampler)
        core.apply(put("p", 4, "x"), 0)
        with pytest.raises(InvalidInputError, match="batch_size must be positive"):
            core.apply(fetch("p", "x", 0), 0)
        with pytest.raises(SamplerError, match="give batch_size"):
            core.apply(fetch("p", "x", 0, token_budget=5), 0)


def test_groups_stay_whole_where_no_budget_is_named() -> None:
    core = ControlCore(sampler=StreamingTokenBudgetSampler(n_samples_per_prompt=2))
    core.apply(tagged(5, 1, 1, 1, 1, 1), 0)
    assert rows(core.apply(fetch("p", "x", 4), 0)) == [0, 1, 2, 3]
    assert rows(core.apply(fetch("p", "x", 2), 0)) == []
    with pytest.raises(SamplerError, match="multiple"):
        core.apply(fetch("p", "x", 1), 0)


class Tags:
    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: {} for index in indexes}


def test_the_sampler_goes_on_from_a_checkpoint() -> None:
    first, second = StreamingTokenBudgetSampler(2), StreamingTokenBudgetSampler(2)
    asked = {"partition_id": "p", "task_name": "t", "dp_rank": 0, "batch_index": 0, "token_budget": 2, "dp_size": 2}
    # A row without total_lengths is a budget.
    assert first.sample([0, 1, 2, 3], 0, **asked, partition=Tags()) == ([0], [0])
    second.load_checkpoint(first.save_checkpoint())
    for sampler in (first, second):
        assert sampler.has_cached_result("p", "t", asked)
        assert sampler.sample([1, 2, 3], 0, **{**asked, "dp_rank": 1}, partition=Tags()) == ([1], [1])
        sampler.clear_cache("p")
        assert not sampler.has_cached_result("p", "t", asked)
        assert sampler.sample([1, 2, 3], 0, **asked, partition=Tags()) == ([1], [1])
    for wrong, text in (({"dp_rank": None}, "dp_rank"), ({"dp_rank": 2}, "dp_rank"), ({}, "partition")):
        with pytest.raises(ValueError, match=text):
            first.sample([2, 3], 0, **{**asked, "batch_index": 5, **wrong})
    with pytest.raises(ValueError, match="balance_unit_multiplier"):
        StreamingTokenBudgetSampler(1, 0)
