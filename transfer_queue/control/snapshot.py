"""The state as plain data that msgpack can carry, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from transfer_queue.control.arrays import Column, as_positions, compact, from_runs, to_runs
from transfer_queue.control.blocks import COLUMNS
from transfer_queue.control.column_groups import ColumnGroup
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.lease import Lease
from transfer_queue.control.partition import Partition
from transfer_queue.control.schema import FieldSchema, schema_key
from transfer_queue.control.state import ControlState
from transfer_queue.control.subscription import Task
from transfer_queue.errors import RequestError

__all__ = ["dump", "dump_partition", "enter", "load", "load_partition", "replace"]

_FORMAT = 1


def dump(state: ControlState) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "shard": state.space.shard,
        "extents": state.space.used,
        "lost_units": sorted(state.units.lost),
        "blocks": state.blocks.dump(),
        "locks": state.locks.dump(),
        "moves": state.moves.dump(),
        "partitions": [dump_partition(partition) for partition in state.partitions.values()],
        **({"loading": True} if state.loading else {}),
    }


def load(state: ControlState, data: dict[str, Any]) -> None:
    """Load what `dump` returned into a new state. Raises RequestError."""
    if state.partitions or state.space.used:
        raise RequestError("a snapshot can only be restored into an empty controller")
    if data.get("format") != _FORMAT:
        raise RequestError(f"snapshot format {data.get('format')!r} is not supported; expected {_FORMAT}")
    if data["shard"] != state.space.shard:
        raise RequestError(f"the snapshot is of shard {data['shard']}, this controller is shard {state.space.shard}")
    state.space.used = data["extents"]
    state.units.lost.update(data["lost_units"])
    state.loading = data.get("loading", state.loading)
    state.locks.load(data.get("locks", {}))  # older snapshots and checkpoints have none
    state.moves.load(data.get("moves", [[], [], []]))  # nor have they these
    state.blocks.load(data["blocks"])
    for partition_data in data["partitions"]:
        with state.log.silenced():
            partition = load_partition(state, partition_data)
        state.partitions[partition.name] = partition
        state.rows += partition.rows


def replace(state: ControlState, data: dict[str, Any]) -> None:
    """Load a snapshot in place of all rows that there are. Leases of the snapshot end, as their clients are gone."""
    with state.log.silenced():  # the record of the adoption implies these clears
        for partition in list(state.partitions.values()):
            state.clear_partition(partition)
        for name in list(state.moves.arriving):
            state.drop_arrival(name)
    state.space.used = 0
    state.moves.clear()
    load(state, data)
    with state.log.silenced():
        for partition in state.partitions.values():
            for task in partition.tasks.values():
                task.last_fetch = state.leases.now
                for lease in list(task.leases.values()):
                    partition.end_lease(task, lease, partition.returning(task, lease))


def _keys(key_of: list[str | None], base: int) -> list[tuple[str, int]]:
    return [(key, ordinal) for ordinal, key in enumerate(key_of, base) if key is not None]


def dump_partition(partition: Partition) -> dict[str, Any]:
    """One partition, whose cells refer to slots of the table of blocks."""
    used = partition.table.used

    def column(column: Column) -> bytes:
        return column.array[:used].tobytes()

    return {
        "name": partition.name,
        "base": partition.base,
        "used": used,
        "rows": partition.rows,
        "nbytes": partition.nbytes,
        "ended": partition.ended,
        "extents": partition.indexes.starts,
        "alive": column(partition.alive),
        "keys": None if partition.key_of is None else _keys(partition.key_of, partition.base),
        "tags": [(ordinal, tag) for ordinal, tag in enumerate(partition.tags, partition.base) if tag],
        "fields": list(partition.fields.column_group_of),
        "families": [
            [
                column_group.fields,
                column(column_group.slot),
                None if column_group.row is None else column(column_group.row),
            ]
            for column_group in partition.fields.column_groups
        ],
        "lengths": {name: column(lengths) for name, lengths in partition.fields.lengths.items()},
        "tasks": [
            [
                task.name,
                task.taken.dump(),
                [[*key, to_runs(rows, 0)] for key, rows in task.batches.items()],
            ]
            for task in partition.tasks.values()
            if task.batches or not task.taken.is_empty
        ],
        "leases": [
            [task.name, lease.number, lease.client, lease.seconds, lease.dealt, *_dump_leased(partition, task, lease)]
            for task in partition.tasks.values()
            for lease in task.leases.values()
        ],
    }


def _dump_leased(partition: Partition, task: Task, lease: Lease) -> list[list[int]]:
    assert task.lease is not None
    positions = as_positions(lease.rows) - partition.base
    positions = positions[positions >= 0]
    return [to_runs(compact(positions[task.lease[positions] == lease.number]), partition.base)]


def load_partition(state: ControlState, data: dict[str, Any]) -> Partition:
    """Return what `dump_partition` returned as a partition that does not belong to the state yet, except its leases."""
    partition = state.new_partition(data["name"])
    used = data["used"]
    partition.table.extend(used)

    def fill(column: Column, raw: bytes) -> Column:
        column.array[:used] = np.frombuffer(raw, column.array.dtype)
        return column

    partition.base, partition.rows, partition.nbytes = data["base"], data["rows"], data["nbytes"]
    partition.ended = data.get("ended", False)  # older snapshots do not say
    for start in data["extents"]:
        partition.indexes.adopt(start)
    fill(partition.alive, data["alive"])
    if data["keys"] is not None:
        partition.key_of = [None] * used
        partition.keys.add([key for key, _ in data["keys"]], [ordinal for _, ordinal in data["keys"]])
        for key, ordinal in data["keys"]:
            partition.key_of[ordinal - partition.base] = key
    if data["tags"]:
        partition.tags.extend([{}] * used)
        for ordinal, tag in data["tags"]:
            partition.tags[ordinal - partition.base] = tag
    column_groups = []
    for names, slot, row in data["families"]:
        column_group = ColumnGroup(list(names), fill(partition.table.add_column(np.int32), slot))
        if row is not None:
            column_group.row = fill(partition.table.add_column(np.int32), row)
        column_groups.append(column_group)
    partition.fields.adopt(column_groups, data["fields"])
    for name, raw in data["lengths"].items():
        partition.fields.lengths[name] = fill(partition.table.add_column(np.int32), raw)
    for name, taken, batches in data["tasks"]:
        task = partition.task(name)
        if isinstance(taken, bytes):  # of older snapshots: a byte for each row
            task.taken.load(np.frombuffer(taken, np.uint8))
        else:
            task.taken.restore(taken, used)
        task.batches.update({(rank, batch): from_runs(runs, 0) for rank, batch, runs in batches})
        partition.drop_if_blank(task)
    for name, number, client, seconds, dealt, runs in data.get("leases", ()):  # older snapshots have none
        task = partition.task(name)
        lease = state.leases.grant(partition, task, client, from_runs(runs, 0), seconds, dealt, number)
        partition.lease(task, from_runs(runs, partition.base), lease)
    return partition


def enter(state: ControlState, name: str, content: dict[str, Any], first_lease: int, clients: list[int]) -> None:
    """Add a partition from `transfer_queue.control.moves.export` to a state that has others. Its leases get the numbers
    from ``first_lease`` on and belong to ``clients``."""
    for found in content["partitions"]:
        if found["name"] != name:
            raise ValueError(f"the state of {found['name']!r}")
        slots = _add_blocks(state, content["blocks"])
        families = [
            [names, slots[np.frombuffer(raw, np.int32)].tobytes(), rows] for names, raw, rows in found["families"]
        ]
        leases = [
            [task, number, client, seconds, dealt, runs]
            for number, client, (task, _, _, seconds, dealt, runs) in zip(
                range(first_lease, first_lease + len(clients)), clients, found.get("leases", ()), strict=True
            )
        ]
        partition = load_partition(state, {**found, "families": families, "leases": leases})
        state.space.skip(partition.indexes.starts)
        state.partitions[name] = partition
        state.rows += partition.rows
        gone = [slot for slot in slots[1:].tolist() if state.blocks.unit.items[slot] in state.units.lost]
        if gone:
            partition.lose(state.blocks.mask(np.array(gone, np.int64)))


def _add_blocks(state: ControlState, table: Mapping[str, Any]) -> Any:
    """Slots of the blocks of a dumped table, by their slots there."""
    blocks = state.blocks
    columns = {name: np.frombuffer(table[name], dtype).tolist() for name, dtype in COLUMNS.items()}
    schemas: dict[int, list[FieldSchema]] = {
        number: msgspec.convert(fields, list[FieldSchema]) for number, _, fields in table["schemas"][1]
    }
    slots = np.zeros(table["used"], np.int32)
    for slot in range(1, table["used"]):
        fields = schemas[columns["schema"][slot]]
        ref = BlockRef(columns["unit"][slot], columns["block"][slot], 0, 0, columns["nbytes"][slot])
        schema = blocks.schemas.share(fields, schema_key(fields))
        slots[slot] = new = blocks.add(ref, columns["start"][slot], columns["cells"][slot], schema)
        blocks.suspect.items[new] = 1  # its unit may have been away since it was stored
    return slots
