"""Commands that only look."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from transfer_queue.control.arrays import Ints, Rows, as_positions, compact, row_count
from transfer_queue.control.batches import EMPTY_BATCH, make_batch
from transfer_queue.control.commands import Batch, ConsumptionStatus, KeysOf, Lookup, ProductionStatus, StatusArrays
from transfer_queue.control.indexes import decode_indexes
from transfer_queue.control.partition import Partition
from transfer_queue.control.puts import did_you_mean, name_some
from transfer_queue.control.row_states import CONSUMED, RESERVED
from transfer_queue.errors import (
    DataLostError,
    InvalidInputError,
    KeyNotFoundError,
    NotReadyError,
    RequestError,
    StorageKeyNotFoundError,
    UnknownPartitionError,
)

_PART = 1024
_STATUS_PART = 32 * _PART

__all__ = [
    "consumption_status",
    "count_rows",
    "keys_of",
    "keys_of_in_parts",
    "lookup",
    "lookup_in_parts",
    "production_status",
    "status_in_parts",
    "subscriptions_of",
    "tagged_keys",
    "tagged_keys_in_parts",
]


def lookup(partition: Partition | None, command: Lookup) -> Batch:
    if command.keys is not None and command.indexes is not None:
        raise InvalidInputError("a lookup names rows by keys or by indexes, not both")
    if command.keys is not None and not command.keys:
        raise InvalidInputError("keys is an empty list")
    if partition is None:
        return _lookup_nowhere(command)
    rows = _find(partition, command)
    if command.fields is None:
        names = tuple(partition.fields.complete_names(rows))
    else:
        names = tuple(command.fields)
    selection = partition.fields.select(names)
    if command.require_ready:
        _require(partition, rows, command)
    return make_batch(partition, rows, selection, locate=command.locate, ready=False)


def lookup_in_parts(partitions: Mapping[str, Partition], command: Lookup) -> Iterator[Batch | None]:
    """As `lookup`, in batches of a thousand rows, with None after other parts of the work.

    The batches are of different moments. Rows that go away meanwhile count as not found.
    """
    name = command.partition
    indexes = b""
    if command.keys and command.indexes is None:
        found = []
        for start in range(0, len(command.keys), _PART):
            if (partition := partitions.get(name)) is None:
                _lookup_nowhere(command)
                return
            part = msgspec.structs.replace(command, keys=command.keys[start : start + _PART])
            found.append(partition.encode(_find(partition, part)))
            yield None
        indexes = b"".join(found)
    elif command.keys is None and command.indexes is not None:
        indexes = command.indexes
    elif (partition := partitions.get(name)) is None or command.keys is not None:
        lookup(partition, command)  # which refuses it
        return
    else:
        indexes = yield from _indexes_in_parts(partitions, name)
        command = msgspec.structs.replace(command, partial=True)
    command = msgspec.structs.replace(command, keys=None, indexes=indexes)
    names = command.fields
    if names is None or command.require_ready:
        names = yield from _names_in_parts(partitions, command)
    selected = tuple(names)
    for partition, rows in _rows_in_parts(partitions, command):
        yield make_batch(partition, rows, partition.fields.select(selected), locate=command.locate, ready=False)


def _indexes_in_parts(partitions: Mapping[str, Partition], name: str) -> Generator[None, None, bytes]:
    """Those of all rows that exist at the first part, and still do at their own."""
    found = []
    for partition, rows in _existing_in_parts(partitions, name):
        found.append(partition.encode(rows))
        yield None
    return b"".join(found)


def _existing_in_parts(partitions: Mapping[str, Partition], name: str) -> Iterator[tuple[Partition, Rows]]:
    """The rows that exist at the first part and still do at their own, some thousand at a time."""
    partition = partitions[name]
    ordinal, end = partition.base, partition.base + partition.table.used
    while max(ordinal, partition.base) < end and partitions.get(name) is partition:
        first = max(ordinal - partition.base, 0)
        ordinal = partition.base + first + _STATUS_PART
        alive = partition.alive.array[first : min(first + _STATUS_PART, end - partition.base, partition.table.used)]
        if len(alive):
            yield partition, slice(first, first + len(alive)) if alive.all() else compact(np.flatnonzero(alive) + first)


def _rows_in_parts(partitions: Mapping[str, Partition], command: Lookup) -> Iterator[tuple[Partition, Rows]]:
    """The rows of ``command.indexes``, a thousand at a time."""
    indexes = command.indexes or b""
    for start in range(0, len(indexes), 8 * _PART):
        part = msgspec.structs.replace(command, indexes=indexes[start : start + 8 * _PART])
        if (partition := partitions.get(command.partition)) is None:
            _lookup_nowhere(part)
            return
        yield partition, _find(partition, part)


def _names_in_parts(partitions: Mapping[str, Partition], command: Lookup) -> Generator[None, None, list[str]]:
    """The fields that are asked for, or else those that all rows have. Raises as `_require` where that is asked for."""
    common: list[str] | None = command.fields
    seen: set[str] = set()  # fields that all rows of some part have
    for partition, rows in _rows_in_parts(partitions, command):
        if command.fields is None and row_count(rows):
            ready = partition.fields.complete_names(rows)
            common = ready if common is None else [name for name in common if name in set(ready)]
            seen.update(ready)
        if command.require_ready:
            try:
                _require(partition, rows, command)
            except (DataLostError, NotReadyError):
                _require(partition, _find(partition, command), command)  # names all rows
                raise
            if command.alike and command.fields is None and len(seen) > len(common or ()):  # the parts differ
                everything = _find(partition, command)
                _require(partition, everything, command)
                common = partition.fields.complete_names(everything)  # the fields were written meanwhile
                seen = set(common)
        yield
    return common or []


def _lookup_nowhere(command: Lookup) -> Batch:
    name = command.partition
    if command.keys is None and command.indexes is None:
        raise UnknownPartitionError(f"partition {name!r} not found")
    if command.partial:
        return EMPTY_BATCH
    if command.keys is not None:
        raise KeyNotFoundError(f"keys {name_some(command.keys)} not found: there is no partition {name!r}")
    raise StorageKeyNotFoundError(f"rows not found: there is no partition {name!r}; it may have been cleared")


def _find(partition: Partition, command: Lookup) -> Rows:
    if command.keys is not None:
        asked: list[Any] | Ints = command.keys
        positions = partition.find_keys(command.keys)
    elif command.indexes is not None:
        asked = decode_indexes(command.indexes)
        positions = partition.find_indexes(command.indexes)
    else:
        return partition.all_rows()
    missing = positions < 0
    if bool(missing.any()):
        if not command.partial:
            absent = [item for item, gone in zip(asked, missing.tolist(), strict=True) if gone]
            if command.keys is not None:
                raise KeyNotFoundError(f"keys {name_some(absent)} not found in partition {command.partition!r}")
            absent = [int(index) for index in absent]
            raise StorageKeyNotFoundError(f"rows {name_some(absent)} not found in partition {command.partition!r}")
        positions = positions[~missing]
    return compact(positions)


def _require(partition: Partition, rows: Rows, command: Lookup) -> None:
    """Raise unless all rows have the asked fields, or, if none are named, at least one field each (``alike``: the same
    fields)."""
    names = command.fields
    column_groups = (
        partition.fields.column_groups
        if names is None
        else partition.fields.select(tuple(dict.fromkeys(names))).column_groups
    )
    lost = partition.lost_rows(rows, column_groups)
    if len(lost):
        raise DataLostError(
            f"{len(lost)} of {row_count(rows)} rows of partition {command.partition!r} were lost with their storage "
            f"unit: {_describe(partition, lost)}; write them again or clear them"
        )
    if names is None:
        some, partial = np.zeros(row_count(rows), np.bool_), []
        for column_group in column_groups:
            have = column_group.slot.array[rows] > 0
            some |= have
            if command.alike and bool(have.any()) and not bool(have.all()):
                partial.append(column_group)
        if not bool(some.all()):
            lacking = as_positions(rows)[~some]
            raise NotReadyError(
                f"rows are not ready: {_describe(partition, lacking)} of partition {command.partition!r} have no data"
            )
        if partial:
            names = [name for name, column_group in partition.fields.column_group_of.items() if column_group in partial]
            raise NotReadyError(
                f"{_lacking(partition, rows, names)} of partition {command.partition!r}, but for other rows; name the "
                "fields to read (tq get: --field), or leave out what some of the rows lack: missing_fields: drop "
                "in the settings of init(), or TQ_MISSING_FIELDS=drop"
            )
        return
    if unknown := [name for name in dict.fromkeys(names) if name not in partition.fields.column_group_of]:
        raise NotReadyError(_never_written(unknown, partition, command.partition))
    if faults := _lacking(partition, rows, names):
        raise NotReadyError(f"{faults} of partition {command.partition!r}")


def _lacking(partition: Partition, rows: Rows, names: list[str]) -> str:
    """Which of the rows lack which of the fields; empty if none does."""
    faults = []
    for name in dict.fromkeys(names):
        lacking = as_positions(rows)[partition.fields.column_group_of[name].slot.array[rows] <= 0]
        if len(lacking):
            faults.append(f"field {name!r} is not ready for {_describe(partition, lacking)}")
    return "; ".join(faults)


def _never_written(unknown: list[str], partition: Partition, name: str) -> str:
    known = partition.fields.sorted_names
    hint = did_you_mean(unknown, known)
    what = f"field {unknown[0]!r} is" if len(unknown) == 1 else f"fields {name_some(unknown)} are"
    them = "it" if len(unknown) == 1 else "them"
    others = f", which has {name_some(known)}{hint}" if known else ""
    return f"{what} not ready: nobody has written {them} to partition {name!r}{others}"


def _describe(partition: Partition, positions: Ints) -> str:
    keys = partition.keys_at(positions)
    if keys is not None and None not in keys:
        return "keys " + name_some([str(key) for key in keys])
    return "rows " + name_some(partition.indexes.indexes(positions, partition.base).tolist())


def keys_of_in_parts(partitions: Mapping[str, Partition], command: KeysOf) -> Iterator[list[str]]:
    """As `keys_of`, a thousand rows at a time."""
    for start in range(0, len(command.indexes), 8 * _PART):
        part = msgspec.structs.replace(command, indexes=command.indexes[start : start + 8 * _PART])
        yield keys_of(partitions.get(command.partition), part)


def keys_of(partition: Partition | None, command: KeysOf) -> list[str]:
    if partition is None:
        raise UnknownPartitionError(f"no corresponding keys: there is no partition {command.partition!r}")
    positions = partition.find_indexes(command.indexes)
    keys = partition.keys_at(positions) if int(positions.min(initial=0)) >= 0 else None
    if keys is None or None in keys:
        without = [
            int(index)
            for index, position in zip(decode_indexes(command.indexes), positions.tolist(), strict=True)
            if position < 0 or partition.key_of is None or partition.key_of[position] is None
        ]
        if without:
            raise RequestError(
                f"no corresponding keys in partition {command.partition!r} for rows {name_some(without)}"
            )
    return [str(key) for key in keys or []]


def tagged_keys(partition: Partition) -> dict[str, dict[str, Any]]:
    """Key -> its tag, read-only, in order of first registration."""
    keys = partition.key_of
    if keys is None:
        return {}
    return {key: tag for key, tag in zip(keys, partition.tags or [{}] * len(keys), strict=True) if key is not None}


def tagged_keys_in_parts(partition: Partition) -> Iterator[dict[str, dict[str, Any]]]:
    """Like `tagged_keys`, but a thousand rows at a time and without copies. The partition may change between two parts:
    rows that are created after the first part, or cleared before their part, are left out."""
    ordinal, end = partition.base, partition.base + partition.table.used
    while max(ordinal, partition.base) < end and partition.key_of is not None:
        first = max(ordinal, partition.base)
        keys = partition.key_of[first - partition.base : first - partition.base + _PART]
        tags = partition.tags_at(slice(first - partition.base, first - partition.base + _PART)) or [{}] * len(keys)
        ordinal, left = first + _PART, end - first
        yield {key: tag for key, tag in zip(keys[:left], tags, strict=False) if key is not None}


def production_status(partition: Partition | None, command: ProductionStatus) -> StatusArrays:
    columns = _columns(partition, command)
    if partition is None or not columns:
        return StatusArrays()
    rows = partition.all_rows()
    return StatusArrays(partition.encode(rows), _produced(partition, columns, rows), columns)


def consumption_status(partition: Partition | None, command: ConsumptionStatus) -> StatusArrays:
    if partition is None:
        return StatusArrays()
    rows = partition.all_rows()
    return StatusArrays(partition.encode(rows), _consumed(partition, command.task, rows), [command.task])


def status_in_parts(
    partitions: Mapping[str, Partition], command: ProductionStatus | ConsumptionStatus
) -> Iterator[StatusArrays]:
    """As `production_status` or `consumption_status`, for some thousand rows at a time, each of another moment. Rows
    that go away meanwhile are left out."""
    partition = partitions.get(command.partition)
    columns = _columns(partition, command) if isinstance(command, ProductionStatus) else [command.task]
    if partition is None or not columns:
        return
    for partition, rows in _existing_in_parts(partitions, command.partition):
        if isinstance(command, ProductionStatus):
            status = _produced(partition, columns, rows)
        else:
            status = _consumed(partition, command.task, rows)
        yield StatusArrays(partition.encode(rows), status, columns)


def _columns(partition: Partition | None, command: ProductionStatus) -> list[str]:
    """The asked fields in field-creation order; empty if one of them is unknown."""
    wanted = set(command.fields)
    if partition is None or not wanted.issubset(partition.fields.column_group_of):
        return []
    return [name for name in partition.fields.column_group_of if name in wanted]


def _produced(partition: Partition, columns: list[str], rows: Rows) -> bytes:
    status = np.empty((row_count(rows), len(columns)), np.int8)
    for column_group in partition.fields.column_groups:
        ready = None
        for column, name in enumerate(columns):
            if name in column_group.fields:
                ready = column_group.slot.array[rows] > 0 if ready is None else ready
                status[:, column] = ready
    return status.tobytes()


def _consumed(partition: Partition, task_name: str, rows: Rows) -> bytes:
    task = partition.tasks.get(task_name)
    return bytes(row_count(rows)) if task is None else (task.taken[rows] == CONSUMED).tobytes()


def count_rows(partition: Partition, waiting: int, most_tasks: int | None = None) -> dict[str, Any]:
    """Counts of one partition for people and metrics; of all its tasks, or of so many that are the newest."""
    used = partition.table.used  # cleared rows have no cells
    tasks = list(islice(reversed(partition.tasks.values()), most_tasks))[::-1]
    written, cells = np.zeros(used, np.bool_), {}
    for column_group in partition.fields.column_groups:
        mask = column_group.slot.array[:used] > 0
        written |= mask
        cells[column_group] = int(np.count_nonzero(mask))
    return {
        "rows": partition.rows,
        "written": int(np.count_nonzero(written)),
        "ended": partition.ended,
        "keys": len(partition.keys),
        "bytes": partition.nbytes,
        "fields": {name: cells[column_group] for name, column_group in partition.fields.column_group_of.items()},
        "lost": partition.count_lost(),
        "tasks": {
            task.name: {
                "consumed": task.taken.count(CONSUMED),
                "promised": task.taken.count(RESERVED),
            }
            for task in tasks
        },
        "waiting": waiting,
    }


def subscriptions_of(partition: Partition) -> list[dict[str, Any]]:
    """What each task may fetch now, by the fields that it asks for; ``consumed`` counts cleared rows too."""
    return [
        {
            "task": item.task.name,
            "fields": list(item.names),
            "ready": item.ready.available,
            "consumed": item.task.taken.count(CONSUMED) + item.task.cleared,
            "waiting": len(item.waiting or ()),
        }
        for item in partition.subscriptions.values()
    ]
