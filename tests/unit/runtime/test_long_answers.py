"""Answers that are made a little at a time: the same as those made at once, with turns for others in between."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import Clear, Command, Commit, ListKeys, Snapshot, Value
from transfer_queue.control.core import ControlCore
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.long_answers import LongAnswers
from transfer_queue.runtime.picture import picture
from transfer_queue.wire.messages import Look


def value_of(core: ControlCore, command: Command) -> Any:
    answer = core.apply(command, 0.0)
    assert isinstance(answer, Value)
    return answer.value


async def made(answers: LongAnswers, body: Any, hidden: str = "") -> Any:
    return msgspec.msgpack.decode(b"".join(await answers.value(body, lambda name: name != hidden)))


async def test_long_answers_are_those_of_the_core_and_leave_turns_to_others() -> None:
    core = ControlCore()
    controller = Controller(
        validate_document(ControllerConfig, {"name": "q"}, "test"), core, asyncio.get_running_loop()
    )
    answers = controller.long_answers
    for name, count in (("large", 70_000), ("small", 3), ("gone", 5)):
        keys = [f"{name}-{number}" for number in range(count)]
        core.apply(Commit(name, keys=keys, tags=[{"number": number} for number in range(count)]), 0.0)
    core.apply(Commit("no-keys", append=2), 0.0)
    core.apply(Clear("large", keys=["large-5", "large-1023", "large-69999"]), 0.0)
    core.apply(Clear("gone"), 0.0)
    assert answers.is_long(ListKeys(""))
    assert answers.is_long(ListKeys("large"))
    assert not answers.is_long(ListKeys("small"))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    for partition in ("large", ""):
        turns = 0
        assert await made(answers, ListKeys(partition)) == value_of(core, ListKeys(partition))
        assert turns > 2
    assert "small" not in await made(answers, ListKeys(""), hidden="small")
    assert await made(answers, Snapshot("")) == value_of(core, Snapshot(""))
    shown = await made(answers, Look())
    assert shown["partitions"] == picture(controller)["partitions"]
    assert msgspec.json.decode(b"".join(await answers.json()))["partitions"] == shown["partitions"]
    beside.cancel()
    await controller.close()


async def test_a_listing_of_a_partition_that_changes_meanwhile_has_all_rows_that_stay() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    core.apply(Commit("p", keys=[f"k{number}" for number in range(50_000)]), 0.0)
    listing = asyncio.create_task(made(controller.long_answers, ListKeys("p")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    core.apply(Clear("p", keys=[f"k{number}" for number in range(45_000)]), 0.0)  # drops rows from the front
    core.apply(Commit("p", keys=["new"]), 0.0)
    found = await listing
    assert set(found["p"]) >= {f"k{number}" for number in range(45_000, 50_000)}
    await controller.close()
