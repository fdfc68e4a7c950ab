"""The state as plain data that msgpack can carry, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_queue.control.arrays import Column, as_positions, compact, from_runs, to_runs
from transfer_queue.control.families import Family
from transfer_queue.control.leases import Lease
from transfer_queue.control.partition import Partition
from transfer_queue.control.plain import copy_tag
from transfer_queue.control.subscription import Task
from transfer_queue.errors import RequestError

if TYPE_CHECKING:
    from transfer_queue.control.core import ControlCore

__all__ = ["dump", "load"]

_FORMAT = 1


def dump(core: ControlCore) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "shard": core.space.shard,
        "extents": core.space.used,
        "lost_units": sorted(core.units.lost),
        "blocks": core.blocks.dump(),
        "locks": core.locks.dump(),
        "partitions": [_dump_partition(partition) for partition in core.partitions.values()],
    }


def load(core: ControlCore, state: dict[str, Any]) -> None:
    """Into a core without any state."""
    if core.partitions or core.space.used:
        raise RequestError("a snapshot can only be restored into an empty controller")
    if state.get("format") != _FORMAT:
        raise RequestError(f"snapshot format {state.get('format')!r} is not supported; expected {_FORMAT}")
    if state["shard"] != core.space.shard:
        raise RequestError(f"the snapshot is of shard {state['shard']}, this controller is shard {core.space.shard}")
    core.space.used = state["extents"]
    core.units.lost.update(state["lost_units"])
    core.locks.load(state.get("locks", {}))  # older snapshots and checkpoints have none
    core.blocks.load(state["blocks"])
    for partition_state in state["partitions"]:
        with core.log.silenced():
            partition = _load_partition(core, partition_state)
        core.partitions[partition.name] = partition
        core.rows += partition.rows


def _dump_partition(partition: Partition) -> dict[str, Any]:
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
        "keys": None if partition.key_of is None else list(partition.keys.items()),
        "tags": [[ordinal, copy_tag(tag)] for ordinal, tag in partition.tags.items()],
        "fields": list(partition.fields.family_of),
        "families": [
            [family.fields, column(family.slot), None if family.row is None else column(family.row)]
            for family in partition.fields.families
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


def _load_partition(core: ControlCore, state: dict[str, Any]) -> Partition:
    partition = Partition(state["name"], core.space, core.blocks, core.log, core.serving.drawer.queueing)
    used = state["used"]
    partition.table.extend(used)

    def fill(column: Column, raw: bytes) -> Column:
        column.array[:used] = np.frombuffer(raw, column.array.dtype)
        return column

    partition.base, partition.rows, partition.nbytes = state["base"], state["rows"], state["nbytes"]
    partition.ended = state.get("ended", False)  # older snapshots do not say
    for start in state["extents"]:
        partition.indexes.adopt(start)
    fill(partition.alive, state["alive"])
    if state["keys"] is not None:
        partition.key_of = [None] * used
        for key, ordinal in state["keys"]:
            partition.keys[key] = ordinal
            partition.key_of[ordinal - partition.base] = key
    partition.tags.update((ordinal, tag) for ordinal, tag in state["tags"])
    families = []
    for names, slot, row in state["families"]:
        family = Family(list(names), fill(partition.table.add_column(np.int32), slot))
        if row is not None:
            family.row = fill(partition.table.add_column(np.int32), row)
        families.append(family)
    partition.fields.adopt(families, state["fields"])
    for name, raw in state["lengths"].items():
        partition.fields.lengths[name] = fill(partition.table.add_column(np.int32), raw)
    for name, taken, batches in state["tasks"]:
        task = partition.task(name)
        if isinstance(taken, bytes):  # of older snapshots: a byte for each row
            task.taken.load(np.frombuffer(taken, np.uint8))
        else:
            task.taken.restore(taken, used)
        task.batches.update({(rank, batch): from_runs(runs, 0) for rank, batch, runs in batches})
        partition.drop_if_blank(task)
    for name, number, client, seconds, dealt, runs in state.get("leases", ()):  # older snapshots have none
        task = partition.task(name)
        lease = core.leases.grant(partition, task, client, from_runs(runs, 0), seconds, dealt, number)
        partition.lease(task, from_runs(runs, partition.base), lease)
    return partition
