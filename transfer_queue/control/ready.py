"""Sets of row positions that give up their lowest members in constant time, however large and full of holes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from transfer_queue.control.arrays import Column, Ints, Rows, as_positions, compact, row_count

__all__ = ["ReadyGroups", "ReadyQueue", "ReadyRows", "make_ready_queue"]

_SHIFT = 10
_CHUNK = 1 << _SHIFT
_WINDOW = 16  # chunks looked at together when members are scattered


class ReadyQueue(Protocol):
    """The rows that a subscription may hand out, lowest first."""

    @property
    def available(self) -> int:
        """Rows that `take` can give now."""

    def add(self, rows: Rows) -> Rows | None: ...
    def discard(self, rows: Rows) -> Rows | None: ...
    def members(self) -> Ints: ...
    def resize(self, capacity: int) -> None: ...
    def retag(self, rows: Rows) -> None:
        """Tags of ``rows``, members or not, changed; without effect on queues that go by position."""


def make_ready_queue(capacity: int, group: int, offset: int) -> ReadyRows | ReadyGroups:
    return ReadyRows(capacity) if group == 1 else ReadyGroups(capacity, group, offset)


class ReadyRows:
    """One byte a row, and one byte a chunk of 1024 rows that says where looking is worth while.

    Finding the lowest member is two memchr calls: flat from a thousand rows to ten million.
    """

    __slots__ = ("_chunks", "bits", "count", "view")

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.bits = bytearray(capacity)
        self.view = np.frombuffer(self.bits, np.uint8)
        self._chunks = bytearray((capacity >> _SHIFT) + 1)

    @property
    def available(self) -> int:
        return self.count

    def resize(self, capacity: int) -> None:
        self.bits = self.bits + bytes(capacity - len(self.bits))
        self.view = np.frombuffer(self.bits, np.uint8)
        self._chunks = self._chunks + bytes((capacity >> _SHIFT) + 1 - len(self._chunks))

    def add(self, rows: Rows) -> Rows | None:
        """Returns the rows that were not members before; None if there are none."""
        if isinstance(rows, slice):
            start, stop = rows.start, rows.stop
            if stop - start == 1:
                if self.bits[start]:
                    return None
                self.bits[start] = 1
                self._chunks[start >> _SHIFT] = 1
                self.count += 1
                return rows
            if stop > start and self.bits.find(1, start, stop) < 0:
                self.view[rows] = 1
                first, last = start >> _SHIFT, (stop - 1) >> _SHIFT
                self._chunks[first : last + 1] = b"\x01" * (last + 1 - first)
                self.count += stop - start
                return rows
        positions = as_positions(rows)
        fresh: Ints = positions[self.view[rows] == 0]
        if not len(fresh):
            return None
        self.view[fresh] = 1
        np.frombuffer(self._chunks, np.uint8)[fresh >> _SHIFT] = 1
        self.count += len(fresh)
        return fresh

    def discard(self, rows: Rows) -> Rows | None:
        """Returns the rows that were members; None if there are none."""
        if isinstance(rows, slice):
            start, stop = rows.start, rows.stop
            if stop - start == 1:
                if not self.bits[start]:
                    return None
                self.bits[start] = 0
                self.count -= 1
                return rows
            if self.bits.find(1, start, stop) < 0:
                return None
        positions = as_positions(rows)
        gone: Ints = positions[self.view[rows] == 1]
        if not len(gone):
            return None
        self.view[gone] = 0
        self.count -= len(gone)
        return gone

    def take(self, count: int) -> Rows:
        """Remove and return the ``count`` lowest members; there must be as many."""
        start = self._first()
        stop = start + count
        if count == 1:
            self.bits[start] = 0
        elif self.bits.find(0, start, stop) < 0 and stop <= len(self.bits):
            self.view[start:stop] = 0
        else:
            positions = self._lowest(count)
            self.view[positions] = 0
            self.count -= count
            return positions
        self.count -= count
        return slice(start, stop)

    def peek(self, count: int) -> Ints:
        """The ``count`` lowest members, or all if there are fewer."""
        return self._lowest(min(count, self.count))

    def retag(self, rows: Rows) -> None: ...

    def members(self) -> Ints:
        return np.flatnonzero(self.view)

    def _first(self) -> int:
        chunk = self._chunks.find(1)
        while True:
            position = self.bits.find(1, chunk << _SHIFT, (chunk + 1) << _SHIFT)
            if position >= 0:
                return position
            self._chunks[chunk] = 0  # emptied since it was marked
            chunk = self._chunks.find(1, chunk)

    def _lowest(self, count: int) -> Ints:
        found: list[Ints] = []
        chunk = 0
        while count:
            chunk = self._chunks.find(1, chunk)
            start = chunk << _SHIFT
            part = np.flatnonzero(self.view[start : start + _WINDOW * _CHUNK])[:count] + start
            if len(part):
                found.append(part)
                count -= len(part)
            else:
                self._chunks[chunk : chunk + _WINDOW] = bytes(len(self._chunks[chunk : chunk + _WINDOW]))
            chunk += _WINDOW
        return np.concatenate(found) if found else np.zeros(0, np.int64)


class ReadyGroups:
    """Rows that leave only in whole groups of ``group`` consecutive rows, lowest group first.

    Position p belongs to group (p + offset) // group: groups are aligned to the partition's first row ever, not to
    the first one still held.
    """

    __slots__ = ("_complete", "_filled", "_group", "_offset", "_rows")

    def __init__(self, capacity: int, group: int, offset: int) -> None:
        self._group = group
        self._offset = offset
        self._rows = ReadyRows(capacity)
        groups = self._number(capacity) + 1
        self._complete = ReadyRows(groups)
        self._filled = Column(np.uint32, groups)

    def _number(self, position: int) -> int:
        return (position + self._offset) // self._group

    @property
    def available(self) -> int:
        return self._complete.count * self._group

    def resize(self, capacity: int) -> None:
        self._rows.resize(capacity)
        before, groups = len(self._filled.array), self._number(capacity) + 1
        self._complete.resize(groups)
        self._filled.move(groups, 0, before)

    def add(self, rows: Rows) -> Rows | None:
        fresh = self._rows.add(rows)
        if fresh is None:
            return None
        if row_count(fresh) == 1:
            number = self._number(fresh.start if isinstance(fresh, slice) else int(fresh[0]))
            filled = self._filled.items[number] = self._filled.items[number] + 1
            if filled == self._group:
                self._complete.add(slice(number, number + 1))
            return fresh
        numbers, counts = self._groups_of(fresh)
        self._filled.array[numbers] += counts
        self._complete.add(compact(numbers[self._filled.array[numbers] == self._group]))
        return fresh

    def discard(self, rows: Rows) -> Rows | None:
        gone = self._rows.discard(rows)
        if gone is not None:
            numbers, counts = self._groups_of(gone)
            self._filled.array[numbers] -= counts
            self._complete.discard(compact(numbers))
        return gone

    def take(self, count: int) -> Rows:
        numbers = self._complete.take(count // self._group)
        self._filled.array[numbers] = 0
        if isinstance(numbers, slice):
            start = numbers.start * self._group - self._offset
            rows: Rows = slice(start, start + count)
        else:
            first = numbers * self._group - self._offset
            rows = (first[:, None] + np.arange(self._group)).ravel()
        self._rows.discard(rows)
        return rows

    def peek(self, count: int) -> Ints:
        """The rows of the lowest complete groups, up to ``count``."""
        first = self._complete.peek(count // self._group) * self._group - self._offset
        rows: Ints = (first[:, None] + np.arange(self._group)).ravel()
        return rows

    def retag(self, rows: Rows) -> None: ...

    def members(self) -> Ints:
        return self._rows.members()

    def _groups_of(self, rows: Rows) -> tuple[Ints, Ints]:
        numbers, counts = np.unique((as_positions(rows) + self._offset) // self._group, return_counts=True)
        return numbers, counts.astype(np.uint32)
