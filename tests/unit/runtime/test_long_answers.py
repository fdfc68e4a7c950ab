"""Answers that are made a little at a time: the same as those made at once, with turns for others in between."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control import queries
from transfer_queue.control.commands import (
    Batch,
    BlockRef,
    Clear,
    Command,
    Commit,
    ConsumptionStatus,
    Fetch,
    KeysOf,
    ListKeys,
    Lookup,
    ProductionStatus,
    Snapshot,
    StatusArrays,
    Value,
)
from transfer_queue.control.core import ControlCore
from transfer_queue.control.queries import status_in_parts
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import KeyNotFoundError, NotReadyError, RequestError
from transfer_queue.runtime import long_answers
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.long_answers import LongAnswers
from transfer_queue.runtime.picture import picture
from transfer_queue.wire.messages import Look


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn after each part, however fast the machine is."""
    monkeypatch.setattr(long_answers, "_SLICE_S", 0.0)


def value_of(core: ControlCore, command: Command) -> Any:
    answer = core.apply(command, 0.0)
    assert isinstance(answer, Value)
    return answer.value


async def looked_up(answers: LongAnswers, command: Lookup) -> Batch:
    return msgspec.msgpack.decode(b"".join(await answers.batch(command)), type=Batch)


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


def test_rows_that_came_after_the_first_part_of_a_listing_are_not_in_it() -> None:
    core = ControlCore()
    core.apply(Commit("p", keys=[f"k{number}" for number in range(60_000)]), 0.0)
    parts = queries._existing_in_parts(core.state.partitions, "p")
    next(parts)
    core.apply(Commit("p", keys=[f"new{number}" for number in range(70_000)]), 0.0)
    core.apply(Clear("p", keys=[f"k{number}" for number in range(60_000)] + [f"new{n}" for n in range(10_000)]), 0.0)
    assert core.state.partitions["p"].base > 60_000
    assert list(parts) == []


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
        assert await looked_up(answers, lookup) == core.apply(lookup, 0.0)
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
    partial = asyncio.create_task(looked_up(controller.long_answers, Lookup("p", keys=keys, partial=True)))
    strict = asyncio.create_task(looked_up(controller.long_answers, Lookup("p", keys=keys)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    core.apply(Clear("p", keys=keys[:60_000]), 0.0)  # drops rows from the front
    found = await partial
    assert found.keys == keys[60_000:]
    assert found.tags == [{"number": number} for number in range(60_000, 100_000)]
    with pytest.raises(KeyNotFoundError):
        await strict
    await controller.close()


def _written(core: ControlCore, block: int, rows: list[int], fields: dict[str, tuple[int | None, ...]]) -> None:
    """A put of these rows of partition p; ``fields``: names and shapes."""
    core.apply(
        Commit(
            "p",
            keys=[f"k{row}" for row in rows],
            fields=[
                FieldSchema(name, "ragged" if None in shape else "dense", "int64", shape)
                for name, shape in fields.items()
            ],
            blocks=[BlockRef(block % 3, block, 0, len(rows), 8)],
            lengths={name: np.array(rows, np.int32).tobytes() for name, shape in fields.items() if None in shape},
        ),
        0.0,
    )


async def test_a_long_lookup_has_the_places_schemas_and_lengths_of_all_rows() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    core.apply(Commit("p", append=1), 0.0)  # without key
    for start in range(0, 20_000, 500):
        shape = (7,) if start < 10_000 else (9,)
        _written(core, 1 + start, list(range(start, start + 500)), {"x": shape, "ids": (None,)})
    _written(core, 50_001, list(range(0, 20_000, 2)), {"y": (1,)})
    _written(core, 50_002, list(range(0, 20_000, 3)), {"x": (3,)})  # splits the family of x and ids
    _written(core, 50_003, list(range(19_000, 19_100)), {"ids": (4,)})  # of unknown lengths
    core.apply(Clear("p", keys=[f"k{row}" for row in range(300, 900)]), 0.0)
    keys = [f"k{row}" for row in range(900, 20_000)]
    for lookup in (
        Lookup("p"),
        Lookup("p", fields=["ids", "x", "y", "z"]),
        Lookup("p", keys=keys, require_ready=True, fields=["x", "ids"]),
        Lookup("p", keys=keys[:17_000], fields=["x", "ids"]),
        Lookup("p", keys=keys[::-1]),
        Lookup("p", keys=["k300", *keys, "k301"], partial=True),
    ):
        found, expected = await looked_up(controller.long_answers, lookup), core.apply(lookup, 0.0)
        assert isinstance(expected, Batch)
        assert found.fields == expected.fields
        assert found.keys == expected.keys
        assert (found.indexes, found.status, found.lengths) == (expected.indexes, expected.status, expected.lengths)
        assert _places(found) == _places(expected)
    with pytest.raises(NotReadyError, match=r"keys \['k901', 'k903', .* 9545 more\]"):
        await looked_up(controller.long_answers, Lookup("p", keys=keys, require_ready=True, fields=["y"]))
    await controller.close()


async def test_a_long_lookup_refuses_a_field_that_whole_parts_lack() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    _written(core, 1, list(range(10_240)), {"x": (1,)})
    _written(core, 2, list(range(4_096)), {"y": (1,)})
    lookup = Lookup("p", keys=[f"k{row}" for row in range(10_240)], require_ready=True, alike=True)
    with pytest.raises(NotReadyError, match="field 'y' is not ready for") as whole:
        core.apply(lookup, 0.0)
    with pytest.raises(NotReadyError) as in_parts:
        await looked_up(controller.long_answers, lookup)
    assert str(in_parts.value) == str(whole.value)
    _written(core, 3, list(range(4_096, 10_240)), {"y": (1,)})
    assert [field.name for field in (await looked_up(controller.long_answers, lookup)).fields] == ["x", "y"]
    await controller.close()


async def test_long_status_arrays_are_those_of_the_core() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    _written(core, 1, list(range(100_000)), {"x": (1,), "ids": (None,)})
    _written(core, 2, list(range(50_000)), {"y": (1,)})
    core.apply(Fetch("p", ["x", "y"], 40_000, "task"), 0.0)
    core.apply(Clear("p", keys=["k3", "k70000"]), 0.0)
    for command in (
        ProductionStatus("p", ["y", "x"]),
        ProductionStatus("p", ["absent"]),
        ConsumptionStatus("p", "task"),
        ConsumptionStatus("p", "other"),
    ):
        assert controller.long_answers.is_long(command)
        found = msgspec.msgpack.decode(b"".join(await controller.long_answers.status(command)), type=StatusArrays)
        assert found == core.apply(command, 0.0)
    await controller.close()


def test_the_status_of_a_partition_that_is_replaced_meanwhile_has_none_of_the_new_rows() -> None:
    core = ControlCore()
    core.apply(Commit("p", append=100_000), 0.0)
    parts = status_in_parts(core.state.partitions, ConsumptionStatus("p", "task"))
    first = next(parts)
    core.apply(Clear("p"), 0.0)
    core.apply(Commit("p", append=200_000), 0.0)
    assert (len(first.status), list(parts)) == (32 * 1024, [])


async def test_a_cleared_partition_is_taken_apart_beside_other_requests() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    keys = [f"k{row}" for row in range(100_000)]
    core.apply(Commit("p", keys=keys, tags=[{"row": row} for row in range(100_000)]), 0.0)
    partition = core.state.partitions["p"]
    core.apply(Clear("p"), 0.0)
    burying = asyncio.create_task(controller.long_answers.bury(partition))
    await asyncio.sleep(0)
    assert not burying.done()
    await burying
    assert (len(partition.keys), partition.tags, partition.key_of) == (0, [], [])
    await controller.close()


async def test_a_long_lookup_begins_again_when_a_put_regroups_the_fields() -> None:
    core = ControlCore()
    loop = asyncio.get_running_loop()
    controller = Controller(validate_document(ControllerConfig, {"name": "q"}, "test"), core, loop)
    _written(core, 1, list(range(60_000)), {"x": (1,), "y": (1,)})
    looking = asyncio.create_task(looked_up(controller.long_answers, Lookup("p", fields=["x", "y"])))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not looking.done()
    _written(core, 2, [0], {"y": (1,)})
    assert _places(await looking) == _places(core.apply(Lookup("p", fields=["x", "y"]), 0.0))  # type: ignore[arg-type]
    await controller.close()


def _places(batch: Batch) -> dict[str, list[tuple[int, int, int] | None]]:
    """(unit, block, row in it) of each row, by the fields."""
    found = {}
    for family in batch.locations:
        blocks = [*zip(family.units, family.blocks, strict=True), None]
        numbers = np.frombuffer(family.block_of_row, np.int32).tolist()
        rows = np.frombuffer(family.row_in_block, np.int32).tolist()
        found[",".join(family.fields)] = [
            (*place, row) if (place := blocks[number]) else None for number, row in zip(numbers, rows, strict=True)
        ]
    return found
