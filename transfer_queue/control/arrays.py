"""Growable columns of numbers, and the two ways of naming rows in them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Column", "Ints", "Rows", "Table", "as_positions", "compact", "from_runs", "row_count", "to_runs"]

Ints: TypeAlias = "NDArray[np.int64]"
Rows: TypeAlias = "slice | Ints"
"""Rows by position: a slice where they are consecutive (the common case), else an int64 array in the order meant."""

_FIRST_CAPACITY = 64


class Column:
    """One number a row: ``array`` for work on many rows, ``items`` for one row without the cost of numpy scalars."""

    __slots__ = ("array", "items")

    array: NDArray[Any]
    items: memoryview

    def __init__(self, dtype: DTypeLike, capacity: int) -> None:
        self._bind(np.zeros(capacity, dtype))

    def _bind(self, array: NDArray[Any]) -> None:
        self.array = array
        self.items = memoryview(array.data)

    def move(self, capacity: int, start: int, stop: int) -> None:
        """Into a fresh array of ``capacity``, keeping the rows ``start`` to ``stop``; the rest is zero."""
        fresh = np.zeros(capacity, self.array.dtype)  # zero pages cost no memory until they are written
        fresh[: stop - start] = self.array[start:stop]
        self._bind(fresh)


class Table:
    """Columns of one length that grow together. Zero is the value of a row nobody wrote."""

    __slots__ = ("_columns", "capacity", "used")

    def __init__(self) -> None:
        self._columns: list[Column] = []
        self.capacity = _FIRST_CAPACITY
        self.used = 0

    def add_column(self, dtype: DTypeLike) -> Column:
        column = Column(dtype, self.capacity)
        self._columns.append(column)
        return column

    def copy_column(self, source: Column) -> Column:
        column = self.add_column(source.array.dtype)
        column.array[: self.used] = source.array[: self.used]
        return column

    def extend(self, rows: int) -> int:
        """Append ``rows`` zero rows; returns the position of the first."""
        first = self.used
        used = first + rows
        if used > self.capacity:
            grown = self.capacity * 4 if self.capacity < 4096 else self.capacity + self.capacity // 2
            self._move(max(used, grown), 0, first)
        self.used = used
        return first

    def drop_front(self, rows: int) -> None:
        """Forget the first ``rows`` rows; the others move down."""
        kept = self.used - rows
        self._move(max(_FIRST_CAPACITY, kept + kept // 4), rows, self.used)
        self.used = kept

    def reset(self, used: int) -> None:
        """Forget all rows but the first ``used``, and give their memory back."""
        self._move(max(_FIRST_CAPACITY, used), 0, used)
        self.used = used

    def _move(self, capacity: int, start: int, stop: int) -> None:
        for column in self._columns:
            column.move(capacity, start, stop)
        self.capacity = capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return sum(column.array.itemsize for column in self._columns) * self.used


def row_count(rows: Rows) -> int:
    if isinstance(rows, slice):
        count: int = rows.stop - rows.start
        return count
    return len(rows)


def as_positions(rows: Rows) -> Ints:
    return np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, slice) else rows


def compact(positions: Ints) -> Rows:
    """The same rows as a slice if they are consecutive and ascending."""
    n = len(positions)
    if n == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first == n - 1 and (n < 3 or bool((np.diff(positions) == 1).all())):
        return slice(first, first + n)
    return positions


def to_runs(rows: Rows, offset: int) -> list[int]:
    """Rows plus ``offset`` as ``[start, stop, start, stop, …]``, order kept."""
    if isinstance(rows, slice):
        return [rows.start + offset, rows.stop + offset] if rows.stop > rows.start else []
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate(([0], breaks))] + offset
    stops = rows[np.concatenate((breaks - 1, [len(rows) - 1]))] + (offset + 1)
    runs: list[int] = np.column_stack((starts, stops)).ravel().tolist()
    return runs


def from_runs(runs: list[int], offset: int) -> Rows:
    """Inverse of `to_runs`."""
    if len(runs) == 2:
        return slice(runs[0] - offset, runs[1] - offset)
    parts = [np.arange(a - offset, b - offset, dtype=np.int64) for a, b in zip(runs[::2], runs[1::2], strict=True)]
    return np.concatenate(parts) if parts else slice(0, 0)
