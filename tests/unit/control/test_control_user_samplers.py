"""Samplers that users write: what they are given, what they may return, whom their faults reach."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.control.build import Drained, fetch, put, rows
from transfer_queue.control import PARKED, ControlCore
from transfer_queue.control import commands as c
from transfer_queue.errors import SamplerError
from transfer_queue.sampler import BaseSampler, SequentialSampler


class Scripted(BaseSampler):
    """Answers as the given function says, and remembers what it was called with."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.answer = answer
        self.calls: list[tuple[Any, int, dict[str, Any]]] = []
        self.cleared: list[str] = []

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((ready_indexes, batch_size, kwargs))
        return self.answer(ready_indexes, batch_size)

    def clear_cache(self, partition_id: str) -> None:
        self.cleared.append(partition_id)


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


def last(ready: list[int], size: int) -> tuple[list[int], list[int]]:
    return ready[-size:], ready[-size:]


def test_sampler_gets_plain_lists_names_and_tags() -> None:
    sampler = Scripted(last)
    core = ControlCore(sampler=sampler)
    core.apply(put("p", 3, "x", tags=[{"n": 1}, {}, {"n": 3}]), 0)
    assert rows(core.apply(fetch("p", "x", 2, budget=5), 0)) == [1, 2]
    ready, size, kwargs = sampler.calls[0]
    assert type(ready) is list
    assert ready == [0, 1, 2]
    assert {type(index) for index in ready} == {int}
    assert size == 2
    assert (kwargs["partition_id"], kwargs["task_name"], kwargs["budget"]) == ("p", "t", 5)
    assert kwargs["partition"].get_custom_meta([2, 0, 77]) == {2: {"n": 3}, 0: {"n": 1}}
    core.validate_state()


def test_names_given_in_the_sampling_config_win() -> None:
    sampler = Scripted(last)
    core = ControlCore(sampler=sampler)
    core.apply(put("p", 1, "x"), 0)
    core.apply(fetch("p", "x", 1, task_name="mine", partition_id="other"), 0)
    assert sampler.calls[0][2]["task_name"] == "mine"
    assert sampler.calls[0][2]["partition_id"] == "other"


def test_rows_that_are_sampled_but_not_consumed_come_again() -> None:
    core = ControlCore(sampler=Scripted(lambda ready, size: (ready[:size], ready[:1])))
    core.apply(put("p", 3, "x"), 0)
    assert rows(core.apply(fetch("p", "x", 2), 0)) == [0, 1]
    assert rows(core.apply(fetch("p", "x", 2), 0)) == [1, 2]


def test_sampler_is_not_asked_before_there_are_enough_rows() -> None:
    sampler = Scripted(last)
    core = ControlCore(sampler=sampler)
    core.apply(put("p", 1, "x", block=1), 0)
    assert core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1) is PARKED
    assert sampler.calls == []
    core.apply(put("p", 1, "x", block=2), 0)
    assert rows(Drained(core).by_request[1]) == [0, 1]


def test_refusal_parks_and_the_next_rows_are_offered() -> None:
    core = ControlCore(sampler=Scripted(lambda ready, size: last(ready, size) if len(ready) > 2 else ([], [])))
    core.apply(put("p", 2, "x", block=1), 0)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == []
    assert core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, request=1) is PARKED
    core.apply(put("p", 1, "x", block=2), 0)
    assert rows(Drained(core).by_request[1]) == [2]


def test_waiters_that_a_sampler_refuses_do_not_hold_up_others() -> None:
    core = ControlCore(sampler=Scripted(lambda ready, size: last(ready, size) if size == 1 else ([], [])))
    core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, request=2)
    core.apply(put("p", 2, "x"), 0)
    assert set(Drained(core).by_request) == {2}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ready, size: 1 / 0, "ZeroDivisionError"),
        (lambda ready, size: None, r"must return \(sampled, consumed\)"),
        (lambda ready, size: (ready,), r"must return \(sampled, consumed\)"),
        (lambda ready, size: ("ab", []), "sampled as a list of int"),
        (lambda ready, size: (ready, [True]), "consumed as a list of int"),
        (lambda ready, size: ([0.5], []), "sampled as a list of int"),
        (lambda ready, size: ([0, 0], []), "repeated rows"),
        (lambda ready, size: ([7], []), "not in the ready list"),
        (lambda ready, size: ([-1], []), "no indexes"),
        (lambda ready, size: ([1 << 70], []), "no indexes"),
        (lambda ready, size: (ready[:1], [7]), "not in the ready list"),
        (lambda ready, size: (ready, ready), "returned 3 rows for a batch of 2"),
        (lambda ready, size: sys.exit(3), "raised SystemExit"),
        (lambda ready, size: (_ for _ in ()).throw(Unspeakable()), "raised Unspeakable"),
        (lambda ready, size: ([Unspeakable()], []), "raised RuntimeError"),
    ],
)
def test_faulty_sampler_is_an_error_to_its_caller_and_changes_nothing(answer: Any, message: str) -> None:
    sampler = Scripted(answer)
    core = ControlCore(sampler=sampler)
    core.apply(put("p", 3, "x"), 0)
    before = core.describe()
    with pytest.raises(SamplerError, match=message):
        core.apply(fetch("p", "x", 2), 0)
    assert core.describe() == before
    core.validate_state()
    sampler.answer = last
    assert rows(core.apply(fetch("p", "x", 2), 0)) == [1, 2]


def test_fault_reaches_the_waiting_caller_only() -> None:
    core = ControlCore(sampler=Scripted(lambda ready, size: last(ready, size) if size == 1 else 1 / 0))
    core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, request=2)
    assert type(core.apply(put("p", 2, "x"), 0)) is c.Committed
    answers = Drained(core).by_request
    assert isinstance(answers[1], SamplerError)
    assert rows(answers[2]) == [1]


def test_numpy_answers_are_fine() -> None:
    core = ControlCore(sampler=Scripted(lambda ready, size: (np.array(ready[:size]), [np.int64(ready[0])])))
    core.apply(put("p", 2, "x"), 0)
    assert rows(core.apply(fetch("p", "x", 2), 0)) == [0, 1]


class Cached(BaseSampler):
    """Keeps batches of ranks as the base class documents."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        ranks = self._states.setdefault(kwargs["partition_id"], {}).setdefault(kwargs["task_name"], {})
        batches = ranks.setdefault(kwargs["dp_rank"], {})
        batch = batches.setdefault(kwargs["batch_index"], ready_indexes[:batch_size])
        return batch, batch


def test_cached_batch_is_answered_though_its_rows_are_consumed() -> None:
    core = ControlCore(sampler=Cached())
    core.apply(put("p", 2, "x"), 0)
    ask = fetch("p", "x", 2, dp_rank=0, batch_index=0)
    assert rows(core.apply(ask, 0)) == [0, 1]
    assert rows(core.apply(ask, 0)) == [0, 1]
    assert rows(core.apply(fetch("p", "x", 2, dp_rank=1, batch_index=0), 0)) == []
    core.apply(c.Clear("p"), 0)
    core.apply(put("p", 2, "x"), 0)
    assert len(rows(core.apply(ask, 0))) == 2


def test_clear_and_full_reset_clear_the_samplers_cache() -> None:
    sampler = Scripted(last)
    core = ControlCore(sampler=sampler)
    core.apply(put("p", 1, "x"), 0)
    core.apply(c.ResetConsumption("p", "t"), 0)
    assert sampler.cleared == []
    core.apply(c.ResetConsumption("p"), 0)
    core.apply(c.Clear("p"), 0)
    core.apply(c.Clear("p"), 0)
    assert sampler.cleared == ["p", "p"]


class Reversed(SequentialSampler):
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        return last(ready_indexes, batch_size)


def test_subclass_of_a_built_in_sampler_is_asked_for_its_choice() -> None:
    core = ControlCore(sampler=Reversed())
    core.apply(put("p", 3, "x"), 0)
    assert rows(core.apply(fetch("p", "x", 2), 0)) == [1, 2]


class Careless(SequentialSampler):
    def clear_cache(self, partition_id: str) -> None:
        raise OSError("disk")


def test_clear_that_the_sampler_refuses_changes_nothing() -> None:
    core = ControlCore(sampler=Careless())
    core.apply(put("p", 1, "x"), 0)
    with pytest.raises(SamplerError, match="disk"):
        core.apply(c.Clear("p"), 0)
    assert core.state.rows == 1
