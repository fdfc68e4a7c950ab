"""Global indexes: how a row's ordinal in its partition and its 64-bit index in the whole queue map to each other.

A partition owns *extents* of 2**20 consecutive indexes, taken as it grows. An extent is never given out twice, so an
index means one row for ever. Bits 48 and up hold the shard, so that controllers need not agree on anything.
"""

from __future__ import annotations

import numpy as np

from transfer_queue.control.arrays import Ints, Rows, as_positions
from transfer_queue.errors import InvalidInputError, RequestError

__all__ = ["IndexMap", "IndexSpace", "decode_indexes"]

_BITS = 20
_EXTENT = 1 << _BITS
_EXTENTS_PER_SHARD = 1 << (48 - _BITS)
_MAX_SHARD = (1 << 15) - 1


def decode_indexes(raw: bytes) -> Ints:
    """i64 bytes to an array (a view)."""
    if len(raw) % 8:
        raise InvalidInputError(f"indexes must be little-endian int64, 8 bytes each; got {len(raw)} bytes")
    return np.frombuffer(raw, np.int64)


class IndexSpace:
    """Gives out extents. ``used``: how many so far."""

    __slots__ = ("shard", "used")

    def __init__(self, shard: int) -> None:
        if not 0 <= shard <= _MAX_SHARD:
            raise InvalidInputError(f"shard must lie between 0 and {_MAX_SHARD}; got {shard}")
        self.shard = shard
        self.used = 0

    def allocate(self) -> int:
        """First index of a new extent."""
        if self.used == _EXTENTS_PER_SHARD:
            raise RequestError(
                f"shard {self.shard} has used up its {_EXTENTS_PER_SHARD} index extents; start a new queue"
            )
        first = (self.shard << 48) + (self.used << _BITS)
        self.used += 1
        return first

    def skip(self, starts: list[int]) -> None:
        """Never give out these extents: an earlier life of this controller did, for a partition that has come back."""
        own = [start for start in starts if start >> 48 == self.shard]
        self.used = max([self.used, *(((start & ((1 << 48) - 1)) >> _BITS) + 1 for start in own)])


class IndexMap:
    """The extents of one partition: its rows number o·2**20 … lie in the extent that starts at ``starts[o]``."""

    __slots__ = ("_extent_of", "_space", "starts")

    def __init__(self, space: IndexSpace) -> None:
        self._space = space
        self.starts: list[int] = []
        self._extent_of: dict[int, int] = {}

    def cover(self, ordinals: int) -> None:
        """Own enough extents for so many rows."""
        while len(self.starts) << _BITS < ordinals:
            self.adopt(self._space.allocate())

    def adopt(self, start: int) -> None:
        self._extent_of[start >> _BITS] = len(self.starts)
        self.starts.append(start)

    def index(self, ordinal: int) -> int:
        return self.starts[ordinal >> _BITS] + (ordinal & (_EXTENT - 1))

    def ordinal(self, index: int) -> int:
        """-1 for an index of no extent of this partition."""
        extent = self._extent_of.get(index >> _BITS)
        return -1 if extent is None else (extent << _BITS) + (index & (_EXTENT - 1))

    def indexes(self, rows: Rows, base: int) -> Ints:
        """Indexes of rows given by position, ``base`` being the ordinal of position 0."""
        if isinstance(rows, slice) and rows.stop > rows.start:
            first, last = rows.start + base, rows.stop + base - 1
            if first >> _BITS == last >> _BITS:
                start = self.index(first)
                return np.arange(start, start + (last - first) + 1, dtype=np.int64)
        ordinals = as_positions(rows) + base
        if not len(ordinals):
            return ordinals
        starts: Ints = np.array(self.starts, np.int64)[ordinals >> _BITS]
        return starts + (ordinals & (_EXTENT - 1))

    def encode(self, rows: Rows, base: int) -> bytes:
        """Return the result of `indexes` as i64 bytes."""
        if isinstance(rows, slice) and rows.stop - rows.start == 1:
            return self.index(rows.start + base).to_bytes(8, "little", signed=True)
        return self.indexes(rows, base).tobytes()

    def ordinals(self, indexes: Ints) -> Ints:
        """-1 for indexes of no extent of this partition."""
        if not len(indexes):
            return indexes
        extents = indexes >> _BITS
        first = int(extents[0])
        if bool((extents == first).all()):
            own = self._extent_of.get(first)
            if own is None:
                return np.full(len(indexes), -1, np.int64)
            return indexes + ((own - first) << _BITS)
        ordinals = np.full(len(indexes), -1, np.int64)
        for extent in np.unique(extents).tolist():
            own = self._extent_of.get(extent)
            if own is not None:
                chosen = extents == extent
                ordinals[chosen] = indexes[chosen] + ((own - extent) << _BITS)
        return ordinals
