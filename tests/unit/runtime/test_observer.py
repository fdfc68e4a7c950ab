"""The controller's past as the page asks for it."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest

from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.core import ControlCore
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.observer import Observer


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
