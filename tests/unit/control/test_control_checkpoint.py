"""A captured state in a new core, its blocks stored elsewhere and in other pieces."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.build import Drained, fetch, i64, places, put, rows
from transfer_queue.checkpoint.relocate import relocate
from transfer_queue.control import PARKED, ControlCore
from transfer_queue.control import commands as c
from transfer_queue.control.checkpoint import adopt, begin_load, capture, end_load
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.records import AnyRecord
from transfer_queue.errors import CapacityError, QueueNotEmptyError, RequestError, SamplerError
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, ReplaySampler

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5), st.sampled_from(["x", "xy", "y"])),
        st.tuples(st.just("keys"), st.integers(0, 9), st.sampled_from(["", "x", "z"])),
        st.tuples(st.just("scatter"), st.integers(0, 9), st.sampled_from(["x", "xz", "y"])),
        st.tuples(st.just("clear"), st.integers(0, 20), st.integers(1, 4)),
        st.tuples(st.just("fetch"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("lose"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("clear all"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


def play(core: ControlCore, steps: list[Any]) -> None:
    for number, (what, a, b) in enumerate(steps, 1):
        unit = 1 + number % 3
        core.unit_joined(unit)
        if what == "append":
            core.apply(put("p", a, b, block=number, unit=unit, tags=[{"n": number}] * a), 0)
        elif what == "keys":
            core.apply(put("q", [f"k{a}", f"k{a + 1}"], b, block=number, unit=unit), 0)
        elif what == "scatter" and "q" in core.state.partitions:
            keys = list(core.state.partitions["q"].keys)[a % 3 :: 2]
            if keys:
                core.apply(put("q", keys[::-1], b, block=number, unit=unit), 0)
        elif what == "clear":
            core.apply(c.Clear("p", indexes=i64(*range(a, a + b))), 0)
        elif what == "fetch":
            core.apply(fetch("p", "x", a, dp_rank=0, batch_index=number), 0)
        elif what == "lose":
            core.unit_lost(a, 0)
        elif what == "clear all":
            core.apply(c.Clear("q"), 0)


def moved(captured: dict[str, Any], piece_rows: int) -> tuple[dict[str, Any], dict[int, tuple[int, int, int, int]]]:
    """The capture with its blocks on unit 9 in pieces, and (old unit, block, row) -> (unit, block, row) as a map."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(captured))
    table = plain["state"]["blocks"]
    cells = np.frombuffer(table["cells"], np.uint32)
    unit, block = np.frombuffer(table["unit"], np.int32), np.frombuffer(table["block"], np.uint64)
    refs: dict[int, list[BlockRef]] = {}
    origin: dict[Any, Any] = {}
    for slot in np.flatnonzero(cells).tolist():
        if unit[slot] in plain["state"]["lost_units"]:
            continue
        old = (int(unit[slot]), int(block[slot]))
        refs[slot] = []
        for first in range(0, 6, piece_rows):
            number = 1000 + len(origin)
            refs[slot].append(BlockRef(9, number, first, piece_rows, 10))
            origin[9, number] = (*old, first)
    plain["state"] = relocate(plain["state"], refs)
    return plain, origin


def cells(core: ControlCore, partition: str, origin: dict[Any, Any] | None) -> Any:
    """Every row with its key, tag and cells, in terms of the blocks before the move."""
    batch = core.apply(c.Lookup(partition, fields=["x", "y", "z"]), 0)
    assert isinstance(batch, c.Batch)
    found = places(batch)
    if origin is not None:
        for name, column in found.items():
            located = [None if cell is None else (*origin[cell[:2]], cell[2]) for cell in column]
            found[name] = [None if cell is None else (cell[0], cell[1], cell[2] + cell[3]) for cell in located]
    return rows(batch), batch.keys, batch.tags, batch.status, found


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, piece_rows=st.sampled_from([1, 2, 6]))
def test_everything_is_where_it_was_though_blocks_moved(steps: list[Any], piece_rows: int) -> None:
    core = ControlCore(sampler=RankAwareSampler())
    play(core, steps)
    captured, origin = moved(capture(core), piece_rows)
    again = ControlCore(sampler=RankAwareSampler(), journal=True)
    again.unit_joined(9)
    adopt(again, captured)
    again.validate_state()
    assert list(again.state.partitions) == list(core.state.partitions)
    assert again.state.rows == core.state.rows
    for name in core.state.partitions:
        assert cells(again, name, origin) == cells(core, name, None)
        assert again.apply(c.ConsumptionStatus(name, "t"), 0) == core.apply(c.ConsumptionStatus(name, "t"), 0)
        assert again.apply(c.ListKeys(name), 0) == core.apply(c.ListKeys(name), 0)
    replayed = ControlCore(sampler=RankAwareSampler(), journal=True)
    records = msgspec.msgpack.encode(Drained(again).records)
    replayed.replay(msgspec.msgpack.decode(records, type=list[AnyRecord]))
    assert sorted(replayed.state.partitions) == sorted(again.state.partitions)
    assert replayed.state.rows == again.state.rows
    for name in list(again.state.partitions):
        again.apply(c.Clear(name), 0)
    assert again.state.blocks.count == 0
    again.validate_state()


def test_rows_keep_their_indexes_in_a_new_queue_and_never_take_those_of_others() -> None:
    core = ControlCore()
    core.apply(put("p", 2, "x"), 0)
    captured, _ = moved(capture(core), 6)
    fresh, used = ControlCore(), ControlCore()
    used.apply(put("other", 3, "x"), 0)
    used.apply(c.Clear("other"), 0)
    adopt(fresh, captured)
    adopt(used, captured)
    assert rows(fresh.apply(fetch("p", "x", 2), 0)) == [0, 1]
    assert rows(used.apply(fetch("p", "x", 2), 0)) == [1 << 20, (1 << 20) + 1]
    assert rows(used.apply(put("new", 1, "x", block=5), 0) and used.apply(c.Lookup("new"), 0)) == [2 << 20]


def test_replacing_frees_what_was_there_serves_those_who_wait_and_is_one_record() -> None:
    source = ControlCore(journal=True)
    source.apply(put("p", ["a", "b"], "x"), 0)
    captured, _ = moved(capture(source), 6)
    core = ControlCore(sample_capacity=3, journal=True)
    for name, block in (("p", 1), ("q", 2)):
        core.apply(put(name, [f"{name} old"], "x", block=block), 0)
    core.apply(put("empty", ["gone"], "x", block=3), 0)
    core.apply(c.Clear("empty", keys=["gone"]), 0)
    assert core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=4) is PARKED
    assert core.apply(put("r", 1, "x", block=5, wait_s=9.0), 0, request=5)
    assert core.apply(put("r", 1, "x", block=6, wait_s=9.0), 0, request=6) is PARKED
    before = Drained(core)
    assert adopt(core, captured, replace=True) == {"p": 1, "q": 1, "r": 1}
    after = Drained(core)
    assert after.frees == [(1, 1), (1, 2), (1, 5)]
    assert core.apply(c.KeysOf("p", indexes=after.by_request[4].indexes), 0) == c.Value(["a", "b"])
    assert isinstance(after.by_request[6], c.Committed)
    assert list(core.state.partitions) == ["p", "r"]
    core.validate_state()
    replayed = ControlCore(sample_capacity=3, journal=True)
    records = msgspec.msgpack.encode(before.records + after.records)
    replayed.replay(msgspec.msgpack.decode(records, type=list[AnyRecord]))
    assert (replayed.state.rows, list(replayed.state.partitions)) == (core.state.rows, ["p", "r"])


def test_queue_with_rows_and_too_little_capacity_refuse() -> None:
    core = ControlCore()
    core.apply(put("p", 3, "x"), 0)
    captured, _ = moved(capture(core), 6)
    before = core.describe()
    with pytest.raises(QueueNotEmptyError, match="'p'"):
        adopt(core, captured)
    assert core.describe() == before
    small = ControlCore(sample_capacity=2)
    with pytest.raises(CapacityError, match="3 rows"):
        adopt(small, captured)
    assert not small.state.partitions


@pytest.mark.parametrize("damage", ["blocks", "partitions", "extents", "format"])
def test_damaged_state_is_refused_and_changes_nothing(damage: str) -> None:
    core = ControlCore()
    core.apply(put("p", 3, "x"), 0)
    captured, _ = moved(capture(core), 6)
    captured["state"][damage] = [1] if damage != "extents" else None
    fresh = ControlCore()
    with pytest.raises(RequestError):
        adopt(fresh, captured)
    assert fresh.describe() == ControlCore().describe()


def test_waiting_fetch_gets_what_was_adopted() -> None:
    core = ControlCore(sampler=GRPOGroupNSampler(2))
    core.apply(put("p", 4, "x"), 0)
    core.apply(fetch("p", "x", 2), 0)
    captured, _ = moved(capture(core), 6)
    fresh = ControlCore(sampler=GRPOGroupNSampler(2))
    assert fresh.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=4) is PARKED
    adopt(fresh, captured)
    assert rows(Drained(fresh).by_request[4]) == [2, 3]


class Unsavable(ReplaySampler):
    def save_checkpoint(self) -> dict[str, Any]:
        raise OSError("disk")


def test_sampler_goes_on_where_it_was_and_one_that_cannot_be_saved_is_named() -> None:
    core = ControlCore(sampler=ReplaySampler())
    core.apply(put("p", 40, "x"), 0)
    core.apply(fetch("p", "x", 8), 0)
    captured = msgspec.msgpack.decode(msgspec.msgpack.encode(capture(core)))
    captured["state"] = relocate(captured["state"], {1: [BlockRef(9, 7, 0, 40, 10)]})
    fresh = ControlCore(sampler=ReplaySampler())
    adopt(fresh, captured)
    assert rows(fresh.apply(fetch("p", "x", 8), 0)) == rows(core.apply(fetch("p", "x", 8), 0))
    with pytest.raises(SamplerError, match=r"Unsavable\.save_checkpoint raised OSError"):
        capture(ControlCore(sampler=Unsavable()))


def test_a_restarted_controller_knows_that_a_load_was_interrupted() -> None:
    """Whether it comes back from its journal or from a snapshot."""
    source = ControlCore()
    source.unit_joined(1)
    source.apply(put("p", 1, "x", block=1, unit=1), 0)
    captured = capture(source)
    core = ControlCore(journal=True)
    core.unit_joined(1)
    begin_load(core)
    adopt(core, {**captured, "state": relocate(captured["state"], {1: [BlockRef(1, 7, 0, 1, 8)]})})
    again = ControlCore()
    again.replay(Drained(core).records)
    assert again.state.loading
    assert again.state.rows == 1
    restored = ControlCore()
    restored.restore(core.snapshot())
    assert restored.state.loading
    end_load(core)
    assert "loading" not in core.snapshot()
