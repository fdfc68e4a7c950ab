"""The controller's past as the page asks for it."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest

from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import Batch, BlockRef, Clear, Commit, Fetch
from transfer_queue.control.core import ControlCore
from transfer_queue.control.schema import FieldSchema
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.observer import Observer

TOKENS = [FieldSchema("tokens", "ragged", "int64", (None,))]


@pytest.mark.parametrize(("span", "step_s"), [("nan", 36), ("-1", 36), ("soon", 36), ("inf", 900), ("1", 1)])
async def test_a_span_that_is_no_time_is_an_hour_and_others_are_limited(span: str, step_s: int) -> None:
    observer = Observer(Controller(ControllerConfig(), ControlCore(), asyncio.get_running_loop()))
    _, (answer,) = await observer.page({"span": span})
    assert json.loads(answer)["step_s"] == step_s


async def test_an_answer_is_made_once_for_all_pages_until_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer(Controller(ControllerConfig(), ControlCore(), asyncio.get_running_loop()))
    made: list[tuple[float, str]] = []
    view = observer.view
    monkeypatch.setattr(observer, "view", lambda span_s, partition: made.append((span_s, partition)) or view(3600, ""))
    for partition in ("", "train", "", "train"):
        await observer.page({"partition": partition})
    assert made == [(3600, ""), (3600, "train")]
    observer.sample(monotonic())
    await observer.page({})
    assert made[2:] == [(3600, "")]


async def test_ready_rows_are_those_of_all_partitions() -> None:
    core = ControlCore()
    observer = Observer(Controller(ControllerConfig(), core, asyncio.get_running_loop()))
    core.unit_joined(1, [], 0.0)
    for number in range(40):  # more than have a past
        block = [BlockRef(1, number + 1, 0, 3, 1000)]
        core.apply(Commit(f"p{number}", append=3, fields=TOKENS, blocks=block), 0.0)
        core.apply(Fetch(f"p{number}", ["tokens"], 1, "trainer"), 0.0)

    def ready(seconds: int) -> tuple[float, float]:
        for _ in range(seconds):  # a look takes at most 2 ms, and goes on a second later
            observer.sample(observer._sampled + 1)
        seen = observer.view(60, "")
        (task,) = seen["tasks"]
        return seen["queue"]["ready"][-1], task["ready"][-1]

    assert ready(2 * 40) == (80.0, 80.0)
    core.apply(Clear("p39"), 0.0)
    assert ready(2 * 40) == (78.0, 78.0)


async def test_each_fetch_counts_however_many_partitions_are_fetched_from_within_a_second() -> None:
    observer = Observer(Controller(ControllerConfig(), ControlCore(), asyncio.get_running_loop()))
    for number in range(1500):
        observer.answered("reader", Fetch(f"p{number}", ["x"], 1, "t"), Batch(bytes(8)), 0.0, 0.0)
    observer._add_fetched()
    assert observer._whole.rows_out == observer._tasks["t"].rows_out == 1500
