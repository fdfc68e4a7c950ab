"""Answers that are made a little at a time: the same as those made at once, with turns for others in between."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import Clear, Command, Commit, KeysOf, ListKeys, Lookup, Snapshot, Value
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import KeyNotFoundError, RequestError
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


async def test_long_lookups_are_those_of_the_core_and_leave_turns_to_others() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    answers = controller.long_answers
    keys = [f"k{number}" for number in range(60_000)]
    core.apply(Commit("p", keys=keys, tags=[{"number": number} for number in range(60_000)]), 0.0)
    core.apply(Commit("p", append=1), 0.0)
    backwards = np.arange(59_999, -1, -1, dtype=np.int64).tobytes()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    for lookup in (
        Lookup("p", keys=keys[::-1], fields=[]),
        Lookup("p", keys=[*keys, "absent"], partial=True),
        Lookup("p", indexes=backwards, locate=False),
        Lookup("p"),
    ):
        turns = 0
        assert answers.is_long(lookup)
        assert await answers.batch(lookup) == core.apply(lookup, 0.0)
        assert turns > 2
    assert answers.is_long(KeysOf("p", backwards))
    assert await made(answers, KeysOf("p", backwards)) == keys[::-1]
    with pytest.raises(KeyNotFoundError, match="absent"):
        await answers.batch(Lookup("p", keys=[*keys, "absent"]))
    with pytest.raises(RequestError, match=r"no corresponding keys in partition 'p' for rows \[60000\]"):
        await made(answers, KeysOf("p", np.arange(60_001, dtype=np.int64).tobytes()))
    with pytest.raises(KeyNotFoundError, match="no partition"):
        await answers.batch(Lookup("nowhere", keys=keys))
    assert not answers.is_long(Lookup("p", keys=keys[:5]))
    assert not answers.is_long(Lookup("nowhere"))
    beside.cancel()
    await controller.close()


async def test_a_lookup_of_rows_that_go_away_meanwhile_says_so() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    keys = [f"k{number}" for number in range(100_000)]
    core.apply(Commit("p", keys=keys, tags=[{"number": number} for number in range(100_000)]), 0.0)
    partial = asyncio.create_task(controller.long_answers.batch(Lookup("p", keys=keys, partial=True)))
    strict = asyncio.create_task(controller.long_answers.batch(Lookup("p", keys=keys)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    core.apply(Clear("p", keys=keys[:60_000]), 0.0)  # drops rows from the front
    found = await partial
    assert found.keys == keys[60_000:]
    assert found.tags == [{"number": number} for number in range(60_000, 100_000)]
    with pytest.raises(KeyNotFoundError):
        await strict
    await controller.close()
