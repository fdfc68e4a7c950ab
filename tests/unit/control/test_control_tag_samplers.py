"""Samplers that go by tags, in the core: the same choices as the samplers make from plain lists."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.build import Drained, fetch, i64, put, rows
from transfer_queue.control import PARKED, ControlCore
from transfer_queue.control import commands as c
from transfer_queue.control.records import AnyRecord
from transfer_queue.errors import SamplerError
from transfer_queue.sampler import PlannedSampler, PrioritySampler, ReplaySampler, TokenBudgetSampler

MAKERS: dict[str, Any] = {
    "tokens": lambda: TokenBudgetSampler(9),
    "token groups": lambda: TokenBudgetSampler(12, 1, 2),
    "tokens of two ranks": lambda: TokenBudgetSampler(9, 2),
    "priority": lambda: PrioritySampler(),
    "window": lambda: PrioritySampler(max_staleness=2),
    "replay": lambda: ReplaySampler(min_rows=2),
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 6), st.integers(0, 5)),
        st.tuples(st.just("fetch"), st.integers(1, 3), st.integers(0, 6)),
        st.tuples(st.just("clear"), st.integers(0, 40), st.integers(1, 5)),
        st.tuples(st.just("tag"), st.integers(0, 40), st.integers(0, 5)),
    ),
    max_size=40,
)


def tag(number: int) -> dict[str, Any]:
    return {"total_lengths": number, "priority": number % 3, "version": number, "weight": number % 4}


class Plain:
    """What a sampler sees without a controller: tags by index."""

    def __init__(self) -> None:
        self.tags: dict[int, dict[str, Any]] = {}

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        return {index: self.tags[index] for index in indexes}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_core_chooses_what_the_sampler_chooses_from_a_plain_list(name: str, steps: list[tuple[str, int, int]]) -> None:
    sampler: PlannedSampler = MAKERS[name]()
    plain, core = Plain(), ControlCore(sampler=MAKERS[name](), journal=True)
    consumed: set[int] = set()
    # Groups of a controller are rows 0 to n-1, n to 2n-1, ...; of a plain list, any n consecutive ones. They are the
    # same while whole groups come and go.
    batch = 0
    group = sampler.group
    records: list[Any] = []
    for number, (what, a, b) in enumerate(steps):
        if what == "put":
            a *= group
            tags = [tag((b + i) % 6) for i in range(a)]
            done = core.apply(put("p", a, "x", block=number + 1, tags=tags), 0)
            plain.tags.update(zip(rows(c.Batch(done.indexes)), tags, strict=True))
        elif what == "clear":
            gone = [index for index in range(a * group, (a + b) * group) if index in plain.tags]
            core.apply(c.Clear("p", indexes=i64(*gone)), 0)
            for index in gone:
                del plain.tags[index]
        elif what == "tag" and a in plain.tags:
            core.apply(c.SetTags("p", i64(a), [tag(b)]), 0)
            plain.tags[a] = tag(b)
        elif what == "fetch" and plain.tags:
            size = a * sampler.group
            for rank in range(getattr(sampler, "dp_size", 1)):
                params = {"version": b, "dp_rank": rank, "batch_index": batch}
                ready = sorted(set(plain.tags) - consumed)
                ask = {**params, "partition": plain, "partition_id": "p", "task_name": "t"}
                expected, spent = sampler.sample(ready, size, **ask)
                assert rows(core.apply(fetch("p", "x", size, **params), 0)) == expected
                consumed.update(spent)
            batch += 1
        core.validate_state()
        records += Drained(core).records
    again = ControlCore(sampler=MAKERS[name](), journal=True)
    again.replay(msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[AnyRecord]))
    assert again.fingerprint() == core.fingerprint()


def test_groups_of_a_controller_stay_those_of_the_partition_s_start() -> None:
    core = ControlCore(sampler=TokenBudgetSampler(12, 1, 2))
    core.apply(put("p", 3, "x", block=1, tags=[tag(0)] * 3), 0)
    core.apply(c.Clear("p", indexes=i64(0)), 0)
    assert rows(core.apply(fetch("p", "x", 2), 0)) == []  # rows 1 and 2 are of different groups
    core.apply(put("p", 1, "x", block=2, tags=[tag(0)]), 0)
    assert rows(core.apply(fetch("p", "x", 2, flush=True), 0)) == [2, 3]


def test_rows_too_old_are_given_up_also_where_the_others_do_not_suffice() -> None:
    core = ControlCore(sampler=PrioritySampler(max_staleness=2))
    core.apply(put("p", 1, "x", block=1, tags=[tag(0)]), 0)
    assert rows(core.apply(fetch("p", "x", 2, version=3), 0)) == []
    assert rows(core.apply(fetch("p", "x", 1, version=0), 0)) == []


def test_waiting_fetch_is_served_when_the_budget_is_used_up() -> None:
    core = ControlCore(sampler=TokenBudgetSampler(10))
    core.apply(put("p", 2, "x", block=1, tags=[{"total_lengths": 4}] * 2), 0)
    assert core.apply(fetch("p", "x", 8, timeout_s=9.0), 0, request=1) is PARKED
    core.apply(put("p", 1, "x", block=2, tags=[{"total_lengths": 3}]), 0)
    assert rows(Drained(core).by_request[1]) == [0, 1]


def test_timeout_says_how_many_tokens_there_are() -> None:
    core = ControlCore(sampler=TokenBudgetSampler(10))
    core.apply(put("p", 2, "x", tags=[{"total_lengths": 4}] * 2), 0)
    core.apply(fetch("p", "x", 8, timeout_s=1.0), 0, request=1)
    core.tick(2)
    assert "hold 8 of 10 tokens" in str(Drained(core).by_request[1])


@pytest.mark.parametrize("through", ["set tags", "upsert"])
def test_changed_tag_serves_a_waiting_fetch(through: str) -> None:
    core = ControlCore(sampler=PrioritySampler(max_staleness=0))
    core.apply(put("p", ["a"], "x", tags=[{"version": 6}]), 0)
    assert core.apply(fetch("p", "x", 2, timeout_s=9.0, version=7), 0, request=1) is PARKED
    core.apply(put("p", ["b", "c"], "x", block=2, tags=[{"version": 7}, {"version": 8}]), 0)
    assert rows(Drained(core).by_request[1]) == [1, 2]  # row 0 was too old
    core = ControlCore(sampler=ReplaySampler())
    core.apply(put("p", ["a"], "x", tags=[{"weight": 0}]), 0)
    assert core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1) is PARKED
    if through == "upsert":
        core.apply(put("p", ["a"], tags=[{"weight": 1}]), 0)
    else:
        core.apply(c.SetTags("p", i64(0), [{"weight": 1}]), 0)
    assert rows(Drained(core).by_request[1]) == [0, 0]


@pytest.mark.parametrize(
    ("sampler", "wrong", "right"),
    [
        (PrioritySampler(), {"priority": "high"}, {"priority": 1}),
        (ReplaySampler(), {"weight": -1}, {"weight": 1}),
        (TokenBudgetSampler(1), {"total_lengths": "long"}, {"total_lengths": 1}),
    ],
)
def test_tag_that_is_no_number_is_an_error_to_who_fetches_until_it_is_corrected(
    sampler: PlannedSampler, wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    core = ControlCore(sampler=sampler)
    assert type(core.apply(put("p", 1, "x", tags=[wrong]), 0)) is c.Committed
    with pytest.raises(SamplerError, match=r"number|float"):
        core.apply(fetch("p", "x", 1), 0)
    core.validate_state()
    core.apply(c.SetTags("p", i64(0), [right]), 0)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == [0]


@pytest.mark.parametrize("name", MAKERS)
def test_rows_survive_growth_and_trimming(name: str) -> None:
    core = ControlCore(sampler=MAKERS[name]())
    core.apply(put("p", 1, "x", tags=[tag(1)]), 0)
    core.apply(fetch("p", "x", 2, version=0), 0)  # subscribes
    for block in range(2, 40):
        core.apply(put("p", 100, "x", block=block, tags=[tag(5)] * 100), 0)
    core.apply(c.Clear("p", indexes=np.arange(3000, dtype=np.int64).tobytes()), 0)
    core.validate_state()
    found = rows(core.apply(fetch("p", "x", 2, version=5), 0))
    assert found
    assert set(found) <= set(range(3000, 3801))


def test_other_sampler_takes_over_at_run_time() -> None:
    core = ControlCore()
    core.apply(put("p", 3, "x", tags=[{"priority": n} for n in range(3)]), 0)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == [0]
    core.set_sampler(PrioritySampler())
    core.validate_state()
    assert rows(core.apply(fetch("p", "x", 1), 0)) == [2]


def test_replay_deals_the_same_rows_to_a_rank_that_asks_again() -> None:
    core = ControlCore(sampler=ReplaySampler())
    core.apply(put("p", 20, "x"), 0)
    first = rows(core.apply(fetch("p", "x", 30, dp_rank=0, batch_index=0), 0))
    assert len(first) > len(set(first))
    assert rows(core.apply(fetch("p", "x", 30, dp_rank=0, batch_index=0), 0)) == first
    assert rows(core.apply(fetch("p", "x", 30, dp_rank=1, batch_index=0), 0)) != first
    assert not any(core.apply(c.ConsumptionStatus("p", "t"), 0).status)
