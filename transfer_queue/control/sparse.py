"""Sparse columns: their memory depends on the rows that are not zero, not on all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from transfer_queue.control.arrays import Ints, Rows, compact

__all__ = ["SparseColumn"]

_SHIFT = 9
_CHUNK = 1 << _SHIFT
_MASK = _CHUNK - 1


class SparseColumn:
    """One number per row, by position; zero by default.

    Chunks of 512 rows exist where a row was not zero; all others share one chunk of zeros. The memory is the item size
    per row of the existing chunks, and 4 bytes per chunk between the first and the last of them.
    """

    # A *place* is a position plus ``_offset``; ``_where`` gives each chunk of places its row of ``_pool``. Row 0 of the
    # pool is the chunk of zeros. ``_flat`` is the pool in one dimension.
    __slots__ = ("_dtype", "_flat", "_offset", "_pool", "_used", "_where")

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self.clear()

    def clear(self) -> None:
        """Set all rows to zero."""
        self._offset = 0
        self._used = 1
        self._where: NDArray[np.int32] = np.zeros(0, np.int32)
        self._bind(np.zeros((0, _CHUNK), self._dtype))

    def _bind(self, pool: NDArray[Any]) -> None:
        self._pool = pool
        self._flat = pool.reshape(-1)

    @property
    def is_empty(self) -> bool:
        """Return whether no chunk exists, so that all rows are zero."""
        return not len(self._where)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, including spare ones, and of their places."""
        return self._pool.nbytes + self._where.nbytes

    def count(self, value: int) -> int:
        """Number of rows that hold ``value``, which is not 0."""
        return int(np.count_nonzero(self._pool[1 : self._used] == value))

    # ------------------------------------------------------------------------------------------------------- reading

    def item(self, position: int) -> int:
        """The number of one row."""
        place = position + self._offset
        chunk = place >> _SHIFT
        if 0 <= chunk < len(self._where):
            value: int = self._flat.item((self._where.item(chunk) << _SHIFT) + (place & _MASK))
            return value
        return 0

    def __getitem__(self, rows: Rows) -> NDArray[Any]:
        """The numbers of ``rows``, valid until the next write: a view if they are all in one chunk."""
        if not isinstance(rows, slice):
            return self._gather(rows)
        start, stop = rows.start + self._offset, rows.stop + self._offset
        first, last = start >> _SHIFT, (stop + _MASK) >> _SHIFT
        if stop <= start or last <= 0 or first >= len(self._where):
            return np.zeros(max(0, stop - start), self._dtype)
        if last - first == 1:
            at = (self._where.item(first) << _SHIFT) + (start & _MASK)
            return self._flat[at : at + stop - start]
        where = self._where[max(first, 0) : last]
        if len(where) < last - first:
            where = _widen(where, max(-first, 0), max(last - len(self._where), 0))
        at = start & _MASK
        return self._pool[where].reshape(-1)[at : at + stop - start]

    def _gather(self, rows: Ints) -> NDArray[Any]:
        places = rows + self._offset
        inside = self._inside(places)
        if inside is None:
            return self._flat[self._flat_places(places)]
        found = np.zeros(len(rows), self._dtype)
        if inside.any():
            found[inside] = self._flat[self._flat_places(places[inside])]
        return found

    def _inside(self, places: Ints) -> NDArray[np.bool_] | None:
        """Which of ``places`` lie between the first and the last chunk; None: all of them."""
        limit = len(self._where) << _SHIFT
        if not len(places) or (int(places.min()) >= 0 and int(places.max()) < limit):
            return None
        return (places >= 0) & (places < limit)

    def _flat_places(self, places: Ints) -> Ints:
        found: Ints = (self._where[places >> _SHIFT].astype(np.int64) << _SHIFT) + (places & _MASK)
        return found

    # ------------------------------------------------------------------------------------------------------- writing

    def __setitem__(self, rows: Rows, value: int) -> None:
        """Set all of ``rows`` to one number."""
        if not isinstance(rows, slice):
            if len(rows):
                self._scatter(rows, value)
            return
        start, count = rows.start + self._offset, rows.stop - rows.start
        chunk, at = start >> _SHIFT, start & _MASK
        if at + count <= _CHUNK and 0 <= chunk < len(self._where) and (found := self._where.item(chunk)):
            at += found << _SHIFT
            if count == 1:
                self._flat[at] = value
            else:
                self._flat[at : at + count] = value
        elif count > 0:
            self._write_run(rows.start, rows.stop, value)

    def _write_run(self, start: int, stop: int, value: int) -> None:
        if value:
            self._cover(start, stop)
        else:
            start = max(start, -self._offset)
            stop = min(stop, (len(self._where) << _SHIFT) - self._offset)
            if stop <= start:
                return
        start, stop = start + self._offset, stop + self._offset
        first, last = start >> _SHIFT, (stop - 1) >> _SHIFT
        where: list[int] = self._where[first : last + 1].tolist()
        if value and 0 in where:
            self._fill_in([chunk for chunk, found in enumerate(where, first) if not found])
            where = self._where[first : last + 1].tolist()
        head = (where[0] << _SHIFT) + (start & _MASK)
        if where == list(range(where[0], where[0] + len(where))):
            self._flat[head : head + stop - start] = value
            return
        tail = where[-1] << _SHIFT
        self._flat[head : (where[0] + 1) << _SHIFT] = value
        self._pool[where[1:-1]] = value
        self._flat[tail : tail + ((stop - 1) & _MASK) + 1] = value

    def _scatter(self, rows: Ints, value: int) -> None:
        if value:
            self._cover(int(rows.min()), int(rows.max()) + 1)
        places = rows + self._offset
        if value:
            chunks = places >> _SHIFT
            if len(missing := chunks[self._where[chunks] == 0]):
                self._fill_in(np.unique(missing).tolist())
        elif (inside := self._inside(places)) is not None:
            places = places[inside]
        if len(places):
            self._flat[self._flat_places(places)] = value

    def _cover(self, start: int, stop: int) -> None:
        """Make places for the positions from ``start`` to ``stop``."""
        if not len(self._where):
            self._offset = -(start & ~_MASK)
        before = -min((start + self._offset) >> _SHIFT, 0)
        after = max(((stop + self._offset + _MASK) >> _SHIFT) - len(self._where), 0)
        if before or after:
            spare = 1 + (len(self._where) >> 2) if after else 0  # rows mostly come in order
            self._where = _widen(self._where, before, after + spare)
            self._offset += before << _SHIFT

    def _fill_in(self, chunks: list[int]) -> None:
        """Add chunks of zeros at these places of ``_where``."""
        first = self._used
        self._used += len(chunks)
        if self._used > len(self._pool):
            pool = np.zeros((max(self._used, len(self._pool) + len(self._pool) // 2), _CHUNK), self._dtype)
            pool[: len(self._pool)] = self._pool
            self._bind(pool)
        if len(chunks) == 1:
            self._where[chunks[0]] = first
        else:
            self._where[chunks] = range(first, self._used)

    def load(self, values: NDArray[Any]) -> None:
        """Replace all rows by ``values``, from position 0 on."""
        self.clear()
        chunks = np.pad(values, (0, -len(values) % _CHUNK)).reshape(-1, _CHUNK)
        self._adopt(chunks, np.arange(len(chunks)))

    def dump(self) -> list[Any]:
        """``[position, bytes, position, bytes, …]`` of the chunks that are not all zero."""
        found: list[Any] = []
        for chunk in np.flatnonzero(self._where).tolist():
            position = (chunk << _SHIFT) - self._offset
            values = self._pool[self._where[chunk]][max(0, -position) :]
            if values.any():
                found += [max(0, position), values.tobytes()]
        return found

    def restore(self, dumped: list[Any], rows: int) -> None:
        """Replace all rows, ``rows`` of them, by what `dump` returned. Raises ValueError if it is damaged."""
        self.clear()
        for position, raw in zip(dumped[::2], dumped[1::2], strict=True):
            values = np.frombuffer(raw, self._dtype)[: rows - position]
            if not 0 <= position <= rows:
                raise ValueError(f"position {position} of {rows}")
            for value in np.unique(values[values != 0]).tolist():
                self[compact(np.flatnonzero(values == value) + position)] = value

    def drop_front(self, rows: int) -> None:
        """Forget the first ``rows`` rows; the others move down. Chunks that are all zero are dropped."""
        self._write_run(0, rows, 0)
        self._offset += rows
        gone = self._offset >> _SHIFT
        if gone > 0 and len(self._where):
            self._offset &= _MASK
            self._adopt(self._pool, self._where[gone:])

    def _adopt(self, chunks: NDArray[Any], where: NDArray[Any]) -> None:
        """Replace the content by the rows ``where`` of ``chunks``, without chunks that are all zero."""
        exist = np.flatnonzero(chunks[where].any(axis=1))
        if not len(exist):
            self.clear()
            return
        kept = chunks[where[exist]]
        first, last = int(exist[0]), int(exist[-1])
        self._offset -= first << _SHIFT
        self._where = np.zeros(last - first + 1, np.int32)
        self._where[exist - first] = np.arange(1, len(exist) + 1)
        self._used = len(exist) + 1
        pool = np.zeros((self._used, _CHUNK), self._dtype)
        pool[1:] = kept
        self._bind(pool)


def _widen(where: NDArray[np.int32], before: int, after: int) -> NDArray[np.int32]:
    """Return ``where`` with this many chunks of zeros added at each end."""
    wide = np.zeros(before + len(where) + after, np.int32)
    wide[before : before + len(where)] = where
    return wide
