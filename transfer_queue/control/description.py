"""The state as text for people, and checks of its consistency for tests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import numpy as np

from transfer_queue.control.arrays import as_positions, to_runs
from transfer_queue.control.commands import Commit, Fetch
from transfer_queue.control.partition import Partition
from transfer_queue.control.row_states import LEASED
from transfer_queue.control.serving import Serving
from transfer_queue.control.state import ControlState
from transfer_queue.control.subscription import Subscription, Task
from transfer_queue.control.wait_queue import Waiter

__all__ = ["describe", "describe_waiters", "validate", "validate_waiters"]

_TAKEN = ("", "{}", "{} (reserved)", "{} (leased)")


def describe(state: ControlState) -> list[str]:
    """One line a row: index, key, tag, where its cells lie as unit/block[row], who consumed it. Equal texts mean equal
    states, except for what is only there for speed."""
    lines = []
    for partition in state.partitions.values():
        lines.append(f"partition {partition.name!r}: {partition.rows} rows, {partition.nbytes} bytes")
        lines += [f"  {_describe_row(partition, int(position))}" for position in as_positions(partition.all_rows())]
        for task in sorted(partition.tasks.values(), key=lambda task: task.name):
            for (rank, batch), rows in sorted(task.batches.items(), key=repr):
                indexes = partition.indexes.indexes(rows, 0).tolist()
                lines.append(f"  {task.name}: batch {batch!r} of rank {rank} is {indexes}")
            for lease in sorted(task.leases.values(), key=lambda lease: lease.number):
                assert task.lease is not None
                held = np.flatnonzero(task.lease[slice(0, partition.table.used)] == lease.number) + partition.base
                indexes = partition.indexes.indexes(held, 0).tolist()
                batch = " as a batch" if lease.dealt else ""
                lines.append(f"  {task.name}: client {lease.client} has {indexes} for {lease.seconds:g} s{batch}")
    lines += [f"unit {unit} is lost" for unit in sorted(state.units.lost)]
    lines += state.locks.describe()
    return lines


def describe_waiters(waiters: Iterable[Waiter]) -> list[str]:
    """Return one line a parked request."""
    return [_describe_waiter(waiter.client, waiter.request, waiter.command) for waiter in waiters]


def _describe_row(partition: Partition, position: int) -> str:
    ordinal = position + partition.base
    parts = [str(partition.indexes.index(ordinal))]
    if partition.key_of is not None and (key := partition.key_of[position]) is not None:
        parts.append(repr(key))
    if partition.tags and (tag := partition.tags[position]):
        parts.append(json.dumps(tag, sort_keys=True, default=str))
    places: dict[str, list[str]] = {}
    for name in partition.fields.column_group_of:
        places.setdefault(_describe_cell(partition, name, position), []).append(name)
    parts += [f"{','.join(names)}={place}" for place, names in places.items() if place]
    for name, lengths in sorted(partition.fields.lengths.items()):
        if lengths.items[position]:
            parts.append(f"len({name})={lengths.items[position] - 1}")
    taken = [_TAKEN[task.taken.item(position)].format(task.name) for task in partition.tasks.values()]
    if any(taken):
        parts.append("consumed by " + ", ".join(sorted(name for name in taken if name)))
    return " ".join(parts)


def _describe_cell(partition: Partition, name: str, position: int) -> str:
    column_group, blocks = partition.fields.column_group_of[name], partition.blocks
    slot = column_group.slot.items[position]
    if not slot:
        return ""
    start = blocks.start.items[abs(slot)]
    if start >= 0:
        row = position + partition.base - start
    else:
        assert column_group.row is not None
        row = column_group.row.items[position]
    place = f"{blocks.unit.items[abs(slot)]}/{blocks.block.items[abs(slot)]}[{row}]"
    return place if slot > 0 else f"{place}(lost)"


def _describe_waiter(client: int, request: int, command: Fetch | Commit) -> str:
    if isinstance(command, Fetch):
        want = f"{command.batch_size} rows with {','.join(command.fields)} for {command.task}"
    else:
        want = "sample budget"
    return f"request {request} of client {client} waits in {command.partition!r} for {want}"


# ------------------------------------------------------------------------------------------------------------- checks


def validate(state: ControlState) -> None:
    """AssertionError if anything kept for speed contradicts the rows. Its cost grows with the state: for tests."""
    assert state.rows == sum(partition.rows for partition in state.partitions.values())
    _validate_blocks(state)
    for partition in state.partitions.values():
        _validate_rows(partition)
        for task in partition.tasks.values():
            _validate_leases(partition, task)
        for subscription in partition.subscriptions.values():
            _validate_subscription(partition, subscription)
    state.locks.validate()


def _validate_blocks(state: ControlState) -> None:
    blocks = state.blocks
    cells: Counter[int] = Counter()
    for partition in state.partitions.values():
        own: set[int] = set()
        for column_group in partition.fields.column_groups:
            slots = np.abs(column_group.slot.array[: partition.table.used])
            for slot in slots[slots != 0].tolist():
                cells[slot] += len(column_group.fields)
                own.add(slot)
        assert partition.nbytes == sum(blocks.nbytes.items[slot] for slot in own)
    live = blocks.live_slots().tolist()
    assert live == sorted(cells), "blocks are live exactly while a cell refers to them"
    assert all(blocks.cells.items[slot] == count for slot, count in cells.items())
    assert blocks.count == len(live)
    schemas = Counter(blocks.schema.items[slot] for slot in live)
    assert len(schemas) == len(blocks.schemas)
    assert all(blocks.schemas[number].blocks == count for number, count in schemas.items())


def _validate_rows(partition: Partition) -> None:
    used = partition.table.used
    alive = partition.alive.array[:used] == 1
    assert partition.rows == alive.sum()
    dead = ~alive
    columns = [task.taken[slice(0, used)] for task in partition.tasks.values()]
    columns += [column_group.slot.array[:used] for column_group in partition.fields.column_groups]
    assert not any(column[dead].any() for column in columns), "cleared rows keep nothing"
    assert not any(task.is_blank for task in partition.tasks.values())
    assert len(partition.tags) in (0, used)
    if partition.key_of is None:
        assert not partition.keys
    else:
        assert len(partition.key_of) == used
        by_ordinal = {ordinal: key for ordinal, key in enumerate(partition.key_of, partition.base) if key is not None}
        assert by_ordinal == {ordinal: key for key, ordinal in partition.keys.items()}
    everything = slice(0, used)
    raw = partition.encode(everything)
    assert to_runs(partition.find_indexes(raw)[alive], 0) == to_runs(np.flatnonzero(alive), 0)
    assert sorted(partition.fields.column_group_of) == partition.fields.sorted_names
    assert all(name in column_group.fields for name, column_group in partition.fields.column_group_of.items())


def _validate_leases(partition: Partition, task: Task) -> None:
    used = partition.table.used
    leased = task.taken[slice(0, used)] == LEASED
    if task.lease is None:
        assert not leased.any()
        assert not task.leases
        return
    numbers = task.lease[slice(0, used)]
    assert np.array_equal(leased, numbers != 0)
    assert Counter(numbers[leased].tolist()) == {number: lease.left for number, lease in task.leases.items()}


def _validate_subscription(partition: Partition, subscription: Subscription) -> None:
    names = set(subscription.names)
    assert set(subscription.selection.unknown) == names - set(partition.fields.column_group_of)
    expected = np.zeros(0, np.int64)
    if not subscription.selection.unknown:
        expected = np.flatnonzero(partition.ready_mask(subscription))
    assert np.array_equal(subscription.ready.members(), expected)
    group = partition.queueing.group
    counts = Counter(((expected + partition.base) // group).tolist())
    assert subscription.ready.available == group * sum(count == group for count in counts.values())


def validate_waiters(serving: Serving, state: ControlState) -> None:
    """AssertionError if a parked fetch could be answered."""
    for name, partition in state.partitions.items():
        lines = serving.wait_queue.lines(name)
        for (_, task, names), line in lines.items():
            subscription = partition.subscriptions[task, names]
            assert subscription.waiting is line
            if serving.adapter.planned is not None:
                needs_rows = [waiter for waiter in line.values() if not waiter.waits_for_fields]
                first = needs_rows[0].draw if needs_rows else None
                if first is not None and not first.least and first.oldest is None:
                    assert first.rows > subscription.ready.available
        for subscription in partition.subscriptions.values():
            assert not subscription.waiting or (name, subscription.task.name, subscription.names) in lines
