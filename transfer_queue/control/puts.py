"""Checks of a commit, all of them before anything changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from transfer_queue.control.arrays import Ints, Rows, compact
from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.commands import Commit
from transfer_queue.control.partition import Partition
from transfer_queue.errors import InvalidInputError, RowChangedError, StorageKeyNotFoundError

__all__ = ["Put", "check_cells", "check_put", "did_you_mean", "name_some"]

_MAX_CELLS = 2**32 - 1
_MAX_APPEND = 2**24
"""Rows that one number may ask for: they take memory here before any data comes."""


class Put(NamedTuple):
    """The rows of a checked commit: ``known`` are the positions of all rows, -1 for those to be created, None if all
    are; ``created`` is how many of ``rows``, ``new_keys`` their keys if they have any."""

    rows: int
    known: Ints | None
    created: int
    new_keys: list[str] | None

    def place(self, created: slice) -> Rows:
        """Positions of all rows, ``created`` being those of the new ones."""
        if self.known is None:
            return created
        if self.created:
            self.known[self.known < 0] = np.arange(created.start, created.stop)
        return compact(self.known)


def check_put(partition: Partition | None, command: Commit) -> Put:
    if (command.keys is not None) + (command.indexes is not None) + (command.append != 0) > 1:
        raise InvalidInputError("a commit names its rows by keys, by indexes or by append; got more than one of them")
    if command.keys is not None:
        put = _by_keys(partition, command.keys)
    elif command.indexes is not None:
        put = _by_indexes(partition, command.partition, command.indexes)
    elif command.append < 0:
        raise InvalidInputError(f"append must not be negative; got {command.append}")
    elif command.append > _MAX_APPEND:
        raise InvalidInputError(f"one put may append at most {_MAX_APPEND} rows; got {command.append}")
    else:
        put = Put(command.append, None, command.append, None)
    if command.tags is not None and len(command.tags) != put.rows:
        raise InvalidInputError(
            f"the number of tags, {len(command.tags)}, does not match the number of rows, {put.rows}"
        )
    if command.fields or command.blocks or command.lengths:
        _check_cells(partition, command, put.rows)
    return put


def _by_keys(partition: Partition | None, keys: list[str]) -> Put:
    n = len(keys)
    if n == 1 and partition is not None:
        ordinal = partition.keys.get(keys[0])
        if ordinal is None:
            return Put(1, None, 1, keys)
        return Put(1, np.array([ordinal - partition.base], np.int64), 0, None)
    if not n:
        raise InvalidInputError("keys is an empty list")
    distinct = set(keys)
    if len(distinct) != n:
        seen: set[str] = set()
        repeated = [key for key in keys if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        raise InvalidInputError(f"Got duplicated keys: {name_some(repeated)}")
    if partition is None or partition.keys.is_disjoint(keys):
        return Put(n, None, n, keys)
    known = partition.find_keys(keys)
    new_keys = [key for key, position in zip(keys, known.tolist(), strict=True) if position < 0]
    return Put(n, known, len(new_keys), new_keys or None)


def _by_indexes(partition: Partition | None, name: str, raw: bytes) -> Put:
    indexes = np.frombuffer(raw, np.int64) if len(raw) % 8 == 0 else None
    if indexes is None or not len(indexes):
        raise InvalidInputError(f"indexes must be one or more little-endian int64; got {len(raw)} bytes")
    if partition is None:
        raise StorageKeyNotFoundError(f"partition {name!r} not found; its rows may have been cleared")
    known = partition.find_indexes(raw)
    if int(known.min()) < 0:
        gone = indexes[known < 0].tolist()
        raise StorageKeyNotFoundError(
            f"rows {name_some(gone)} not found in partition {name!r}; they may have been cleared"
        )
    if not isinstance(compact(known), slice) and len(np.unique(known)) != len(known):
        raise InvalidInputError(f"Got duplicated indexes in a put of {len(known)} rows")
    return Put(len(known), known, 0, None)


def _check_cells(partition: Partition | None, command: Commit, rows: int) -> None:
    if not command.fields or not command.blocks:
        raise InvalidInputError("fields and blocks come together: a commit with one and not the other stores nothing")
    if partition is None or not partition.has_layout(command.fields):
        names = [field.name for field in command.fields]
        if len(set(names)) != len(names):
            raise InvalidInputError(f"Got duplicated fields: {names}")
    if rows * len(command.fields) > _MAX_CELLS:
        raise InvalidInputError(
            f"a put may have at most {_MAX_CELLS} cells; got {rows} rows x {len(command.fields)} fields"
        )
    covered = 0
    for ref in command.blocks:
        if ref.row_start != covered or ref.rows < 1:
            raise InvalidInputError(f"block {ref.block} starts at row {ref.row_start} of the put; expected {covered}")
        covered += ref.rows
    if covered != rows:
        raise InvalidInputError(f"the blocks hold {covered} rows, which does not match the {rows} rows of the put")
    for name, raw in command.lengths.items():
        if all(field.name != name for field in command.fields):
            raise InvalidInputError(f"lengths given for field {name!r}, which is not in the put")
        if len(raw) != 4 * rows:
            raise InvalidInputError(f"lengths of field {name!r}: {len(raw)} bytes does not match {rows} rows of int32")


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """``; did you mean 'tokens'?`` with the names that resemble unknown ones; empty if none does."""
    names = list(known)
    near = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
    return f"; did you mean {' and '.join(map(repr, dict.fromkeys(near)))}?" if near else ""


def check_cells(partition: Partition | None, put: Put, expects: dict[str, int], blocks: BlockTable) -> None:
    """Raises RowChangedError unless the one row of the put exists and its cells lie in these blocks (0: no cell)."""
    if put.rows != 1:
        raise InvalidInputError(f"a put that expects cells is of one row; got {put.rows}")
    found: dict[str, int] | None = None
    if partition is not None and put.known is not None and put.known[0] >= 0:
        position, groups = int(put.known[0]), partition.fields.column_group_of
        slots = {name: abs(int(groups[name].slot.array[position])) if name in groups else 0 for name in expects}
        found = {name: int(blocks.block.array[slot]) if slot else 0 for name, slot in slots.items()}
    if found != expects:
        raise RowChangedError(
            f"the row is gone, or its fields {sorted(expects)} changed since they were read; read them and try again"
        )


def join_names(names: Sequence[str]) -> str:
    """All of them, as in a sentence: ``'a', 'b' and 'c'``."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} and {last}" if others else last


def name_some(items: list[object] | list[str] | list[int]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(repr(item)[:80] for item in items[:5])
    return f"[{shown}]" if len(items) <= 5 else f"[{shown}, … {len(items) - 5} more]"
