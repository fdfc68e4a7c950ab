"""Random histories: the core and the naive model see the same commands and must say the same.

For millions of steps: HYPOTHESIS_PROFILE=nightly pytest --timeout 0 tests/unit/control/test_control_model.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.control.build import Drained, i64, ints, places, schema
from tests.unit.control.model import LATER, Model, Refused, Row
from transfer_queue.control import ControlCore, Parked, indexes, key_table, partition, ready
from transfer_queue.control import commands as c
from transfer_queue.control.arrays import Rows
from transfer_queue.control.records import AnyRecord, Record
from transfer_queue.control.row_states import Transition
from transfer_queue.control.subscription import Task
from transfer_queue.errors import TransferQueueError
from transfer_queue.sampler import (
    GRPOGroupNSampler,
    PlannedSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

_EXTENT_BITS = 3

_SAMPLERS = [
    SequentialSampler,
    lambda: GRPOGroupNSampler(2),
    lambda: GRPOGroupNSampler(3),
    RankAwareSampler,
    lambda: SeqlenBalancedSampler(2, 2),
]
# Drawn from so few values that puts, fetches and clears meet. Lists name the likely thing more often.
_partitions = st.sampled_from(["p", "p", "p", "p", "p", "q"])
_keys = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=6)
_fields = st.sampled_from(["x", "x", "xy", "xy", "y", "z", "yx", "xyz"]).map(list)
_tasks = st.sampled_from(["t", "t", "t", "u"])
_waits = st.sampled_from([0.0, 10.0, 10.0, 30.0])
_tags = st.one_of(st.none(), st.dictionaries(st.sampled_from(["total_lengths", "n"]), st.integers(1, 9)))
_positions = st.lists(st.integers(0, 12), min_size=1, max_size=6)


_leases = st.sampled_from([0.0, 0.0, 6.0, 20.0])
_clients = st.sampled_from([7, 7, 8])

_EVENTS = [
    "acknowledge",
    "acknowledge",
    "client_is_gone",
    "clear_indexes",
    "clear_indexes",
    "clear_keys",
    "clear_partition",
    "client_goes",
    "reset",
    "restart",
    "set_tags",
    "take_snapshot",
    "time_passes",
    "unit_is_lost",
    "unit_joins",
    "unit_joins",
]


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Iterator[None]:
    """Thresholds so low that short histories cross them, and every change of a row's state is one of the table."""
    move = Task.move

    def move_as_listed(task: Task, rows: Rows, transition: Transition) -> None:
        assert set(task.taken[rows].tolist()) <= transition.sources
        move(task, rows, transition)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "move", move_as_listed)
        patch.setattr(partition, "_TRIM_FROM", 4)
        patch.setattr(partition, "_MAX_SUBSCRIPTIONS", 3)
        patch.setattr(indexes, "_BITS", _EXTENT_BITS)
        patch.setattr(indexes, "_EXTENT", 1 << _EXTENT_BITS)
        patch.setattr(key_table, "_WHOLE", 4)
        patch.setattr(ready, "_SHIFT", 2)
        patch.setattr(ready, "_CHUNK", 4)
        patch.setattr(ready, "_WINDOW", 2)
        yield


class History(RuleBasedStateMachine):
    @initialize(make=st.sampled_from(_SAMPLERS), capacity=st.sampled_from([None, None, 6, 9]))
    def begin(self, make: Any, capacity: int | None) -> None:
        self.make: Any = make
        self.capacity = capacity
        self.sampler: PlannedSampler = make()
        self.model = Model(self.sampler, capacity, 1 << _EXTENT_BITS)
        self.records: list[Record] = []
        self.core = self.new_core()
        self.snapshot: tuple[dict[str, Any], int] = (self.core.snapshot(), 0)
        self.now = 0.0
        self.requests = 0
        self.blocks = 1
        first = c.Commit("p", append=4, fields=schema("x"), blocks=[c.BlockRef(1, 1, 0, 4, 10)])
        self.compare(first, lambda: self.model.commit(first, self.requests, 0.0), self.check_rows)

    def new_core(self) -> ControlCore:
        return ControlCore(sampler=self.make(), sample_capacity=self.capacity, journal=True)

    @rule(
        name=_partitions,
        keys=_keys,
        how=st.sampled_from(["keys", "append", "append", "indexes", "indexes"]),
        fields=st.one_of(st.just([]), _fields, _fields, _fields),
        data=st.data(),
        wait=_waits,
    )
    def commit(self, name: str, keys: list[str], how: str, fields: list[str], data: st.DataObject, wait: float) -> None:
        known = [row.index for row in self.model.parts[name].rows] if name in self.model.parts else []
        if how == "indexes":
            indexes = [[*known, 999][position % (len(known) + 1)] for position in data.draw(_positions)]
            if data.draw(st.integers(0, 5)):
                indexes = list(dict.fromkeys(index for index in indexes if index != 999)) or [999]
        elif data.draw(st.integers(0, 5)):
            keys = list(dict.fromkeys(keys))
        n = len(indexes) if how == "indexes" else len(keys)
        tags = data.draw(st.one_of(st.none(), st.lists(_tags, min_size=n, max_size=n)))
        lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), np.int32).tobytes()
        command = c.Commit(
            name,
            keys=keys if how == "keys" else None,
            indexes=i64(*indexes) if how == "indexes" else None,
            append=n if how == "append" else 0,
            fields=schema(*fields, shape=(data.draw(st.integers(1, 2)),)),
            blocks=self.draw_blocks(n, data) if fields else [],
            tags=None if tags is None else [tag or {} for tag in tags],
            lengths={fields[0]: lengths} if fields and data.draw(st.booleans()) else {},
            wait_s=wait,
        )
        deadline = self.now + wait if wait else 0.0
        self.compare(command, lambda: self.model.commit(command, self.requests, deadline), self.check_rows)

    def draw_blocks(self, rows: int, data: st.DataObject) -> list[c.BlockRef]:
        cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=1))})
        refs = []
        for start, stop in pairwise(cuts):
            self.blocks += 1
            refs.append(c.BlockRef(data.draw(st.integers(1, 2)), self.blocks, start, stop - start, 10))
        return refs

    @rule(
        name=_partitions,
        fields=_fields,
        size=st.sampled_from([1, 1, 2, 2, 3, 5]),
        task=_tasks,
        wait=_waits,
        rank=st.integers(0, 1),
        batch=st.sampled_from([0, 0, 1, 2]),
        ranked=st.booleans(),
        lease=_leases,
        client=_clients,
    )
    def fetch(
        self,
        name: str,
        fields: list[str],
        size: int,
        task: str,
        wait: float,
        rank: int,
        batch: int,
        ranked: bool,
        lease: float,
        client: int,
    ) -> None:
        params = {"dp_rank": rank, "batch_index": batch} if ranked else {}
        self.draw(c.Fetch(name, fields, size, task, wait, params, lease_s=lease), client)

    def draw(self, command: c.Fetch, client: int = 7) -> None:
        grouped = isinstance(self.sampler, GRPOGroupNSampler)
        size = command.batch_size + -command.batch_size % self.sampler.group
        params = command.params
        if not params and not grouped:
            params = {"dp_rank": 0, "batch_index": 0}
        command = msgspec.structs.replace(command, batch_size=size, params=params)
        deadline = self.now + command.timeout_s if command.timeout_s else 0.0
        self.compare(
            command, lambda: self.model.fetch(command, self.requests, deadline, client), self.check_batch, client
        )

    @rule(name=st.just("p"), task=st.just("t"), rank=st.integers(0, 1), batch=st.integers(0, 1), wait=st.just(30.0))
    def wait_for_two(self, name: str, task: str, rank: int, batch: int, wait: float) -> None:
        self.draw(c.Fetch(name, ["x"], 2, task, wait, {"dp_rank": rank, "batch_index": batch}))

    @rule(event=st.sampled_from(_EVENTS), data=st.data())
    def event(self, event: str, data: st.DataObject) -> None:
        getattr(self, event)(data)

    def some_indexes(self, name: str, data: st.DataObject) -> list[int]:
        rows = self.model.parts[name].rows if name in self.model.parts else []
        return [rows[position % len(rows)].index if rows else 5 for position in data.draw(_positions)]

    def clear_keys(self, data: st.DataObject) -> None:
        name, keys = data.draw(_partitions), data.draw(_keys)
        self.compare(c.Clear(name, keys), lambda: self.model.clear(name, lambda row: row.key in keys))

    def clear_indexes(self, data: st.DataObject) -> None:
        name = data.draw(_partitions)
        chosen = self.some_indexes(name, data)
        command = c.Clear(name, None, i64(*chosen, 10**9))
        self.compare(command, lambda: self.model.clear(name, lambda row: row.index in chosen))

    def clear_partition(self, data: st.DataObject) -> None:
        name = data.draw(_partitions)
        self.compare(c.Clear(name), lambda: self.model.clear(name, None))

    def reset(self, data: st.DataObject) -> None:
        name, task = data.draw(_partitions), data.draw(st.one_of(st.none(), _tasks))
        self.compare(c.ResetConsumption(name, task), lambda: self.model.reset(name, task))

    def set_tags(self, data: st.DataObject) -> None:
        name = data.draw(_partitions)
        chosen = self.some_indexes(name, data)
        tags = [data.draw(_tags) or {} for _ in chosen]
        self.compare(c.SetTags(name, i64(*chosen), tags), lambda: self.model.set_tags(name, chosen, tags))

    def time_passes(self, data: st.DataObject) -> None:
        self.now += data.draw(st.sampled_from([1.0, 8.0]))
        self.core.tick(self.now)
        self.model.tick(self.now)

    def client_goes(self, data: st.DataObject) -> None:
        waiting = [(wait.client, wait.request) for wait in self.model.waits] or [(7, self.requests)]
        client, request = data.draw(st.sampled_from(waiting))
        self.core.cancel(client, request)
        self.model.cancel(request)

    def client_is_gone(self, data: st.DataObject) -> None:
        client = data.draw(_clients)
        self.core.client_gone(client, self.now)
        self.model.client_gone(client)

    def acknowledge(self, data: st.DataObject) -> None:
        name, task = data.draw(_partitions), data.draw(_tasks)
        chosen = self.some_indexes(name, data)
        command = c.Acknowledge(name, task, i64(*chosen, 10**9))
        self.compare(command, lambda: self.model.acknowledge(name, task, chosen))

    def unit_is_lost(self, data: st.DataObject) -> None:
        unit = data.draw(st.integers(1, 2))
        self.core.unit_lost(unit, self.now)
        self.model.unit_lost(unit)

    def unit_joins(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.model.lost_units) or [1, 2]))
        gone = data.draw(st.sets(st.integers(1, max(1, self.blocks)), max_size=2))
        inventory = set(range(1, self.blocks + 1)) - gone
        self.core.unit_joined(unit, inventory)
        self.model.unit_joined(unit, inventory)

    def take_snapshot(self, data: st.DataObject) -> None:
        raw = msgspec.msgpack.encode(self.core.snapshot())
        self.snapshot = (msgspec.msgpack.decode(raw), len(self.records))

    def restart(self, data: st.DataObject) -> None:
        fingerprint = self.core.fingerprint()
        records = msgspec.msgpack.decode(msgspec.msgpack.encode(self.records), type=list[AnyRecord])
        core = self.new_core()
        if data.draw(st.booleans()):
            core.restore(self.snapshot[0])
            records = records[self.snapshot[1] :]
        core.replay(records)
        core.restart_leases(self.now)
        assert core.fingerprint() == fingerprint
        self.core = core
        self.model.restart()

    # -------------------------------------------------------------------------------------------------- comparison

    def compare(self, command: c.Command, model: Any, check: Any = lambda *_: None, client: int = 7) -> None:
        self.requests += 1
        before = self.core.describe()
        try:
            expected = model()
        except Refused as refused:
            expected = refused
        error: TransferQueueError | None
        try:
            reply = self.core.apply(command, self.now, client=client, request=self.requests)
        except TransferQueueError as raised:
            error = raised
        else:
            error = None
        if error is not None:
            assert isinstance(expected, Refused), error
            assert type(error).__name__ == expected.args[0], error
            assert self.core.describe() == before
            return
        assert not isinstance(expected, Refused), (expected, reply)
        assert isinstance(reply, Parked) == (expected is LATER)
        if expected is not LATER:
            check(command, reply, expected)

    def check_rows(self, command: Any, reply: Any, expected: list[Row]) -> None:
        assert ints(reply.indexes) == [row.index for row in expected]
        names = [name for name in "xyz" if expected and all(row.ready([name]) for row in expected)]
        assert reply.ready == names
        if reply.tags is not None:
            assert reply.tags == [row.tag for row in expected]

    def check_batch(self, command: Any, reply: Any, expected: list[Row]) -> None:
        assert ints(reply.indexes) == [row.index for row in expected]
        found = places(reply)
        for name in dict.fromkeys(command.fields if expected else []):
            assert found[name] == [row.cells[name] for row in expected]
            lengths = [row.lengths.get(name) for row in expected]
            assert (name in reply.lengths) == (None not in lengths)
            if name in reply.lengths:
                assert ints(reply.lengths[name], "<i4") == lengths
        assert not reply.tags or reply.tags == [row.tag for row in expected]
        assert reply.tags or not any(row.tag for row in expected)
        assert (reply.keys or [None] * len(expected)) == [row.key for row in expected]

    @invariant()
    def effects_agree(self) -> None:
        effects = Drained(self.core)
        self.records += effects.records
        assert effects.frees == sorted(self.model.frees)
        assert set(effects.by_request) == set(self.model.answers)
        for request, answer in effects.by_request.items():
            expected = self.model.answers[request]
            if isinstance(expected, Refused):
                assert type(answer).__name__ == expected.args[0]
            else:
                assert ints(answer.indexes) == [index for index, _ in expected]
        self.model.frees.clear()
        self.model.answers.clear()

    @invariant()
    def states_agree(self) -> None:
        self.core.validate_state()
        assert list(self.core.state.partitions) == list(self.model.parts)
        for name, part in self.model.parts.items():
            found = self.core.apply(c.Lookup(name, fields=["x", "y", "z"]), self.now)
            assert isinstance(found, c.Batch)
            self.check_all_rows(name, found, part.rows)
            for task in ("t", "u"):
                status = self.core.apply(c.ConsumptionStatus(name, task), self.now)
                assert isinstance(status, c.StatusArrays)
                assert ints(status.status, "i1") == [int(task in row.consumed) for row in part.rows]
            self.check_production(name, part)
            listed = self.core.apply(c.ListKeys(name), self.now)
            assert listed == c.Value({name: {row.key: row.tag for row in part.rows if row.key}})
        assert len(self.core.wait_queue) == len(self.model.waits)

    def check_all_rows(self, name: str, found: c.Batch, rows: list[Row]) -> None:
        assert ints(found.indexes) == [row.index for row in rows]
        assert ints(found.status, "i1") == [int(row.ready("xyz")) for row in rows]
        for column, cells in places(found).items():
            assert cells == [row.cells[column] if row.ready([column]) else None for row in rows]

        for row in rows:
            one = self.core.apply(c.Lookup(name, indexes=i64(row.index), fields=["x", "y", "z"]), self.now)
            assert isinstance(one, c.Batch)
            assert {column: ints(raw, "<i4")[0] for column, raw in one.lengths.items()} == row.lengths

    def check_production(self, name: str, part: Any) -> None:
        status = self.core.apply(c.ProductionStatus(name, list(part.fields)), self.now)
        assert isinstance(status, c.StatusArrays)
        if part.fields:
            assert status.columns == part.fields
            expected = [int(row.ready([column])) for row in part.rows for column in part.fields]
            assert ints(status.status, "i1") == expected


TestHistory = History.TestCase
examples, steps = (50_000, 80) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else (300, 40)
TestHistory.settings = settings(max_examples=examples, stateful_step_count=steps)
