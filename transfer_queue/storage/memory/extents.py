"""Which bytes of an arena are in use: an allocator of extents, pure bookkeeping.

Free extents are kept by size class: 16 classes for each power of two, so that the smallest class that surely fits is
found with a bit operation and wastes at most 1/16 of the request (two-level segregated fit, Masmano et al. 2004).
Neighbouring free extents are merged at once. All operations take constant time, but for a full arena's last resort:
looking through one size class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from transfer_queue.errors import InvalidInputError

__all__ = ["Extents", "ExtentsStats"]

ALIGN: Final = 64
CLASSES_LOG2: Final = 4


@dataclass(frozen=True)
class ExtentsStats:
    """Bytes and counts. ``used`` includes ``leased_bytes``: extents freed while under lease, not yet recycled."""

    capacity: int
    used: int
    free: int
    largest_free: int
    extents: int
    leases: int
    leased_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lies outside the largest free extent, 0 to 1."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class Extents:
    """Extents of ``capacity`` bytes from offset ``start`` on, each a multiple of ``align`` long.

    An extent freed while under lease stays in use until the last of its leases is released: a reader of it in place
    is safe from its being recycled. Raises InvalidInputError for sizes below one ``align`` or an ``align`` that is not
    a power of two.
    """

    def __init__(self, capacity: int, *, start: int = 0, align: int = ALIGN) -> None:
        if align < 1 or align & (align - 1):
            raise InvalidInputError(f"align must be a power of two, not {align}")
        if start < 0 or capacity < align:
            raise InvalidInputError(f"an arena needs at least {align} bytes from a start of 0 or more, not {capacity}")
        self._align = align
        self._start = -(-start // align) * align
        self._end = (start + capacity) // align * align
        if self._end <= self._start:
            raise InvalidInputError(f"no extent of {align} bytes lies within {start} and {start + capacity}")
        self._used: dict[int, int] = {}
        self._used_bytes = 0
        self._leased: dict[int, int] = {}
        self._doomed: dict[int, int] = {}
        self._leases: dict[int, tuple[int, ...]] = {}
        self._lease_numbers = itertools.count(1)
        self._free_by_start: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        self._bin_bits = 0
        self._add_free(self._start, self._end - self._start)

    @property
    def capacity(self) -> int:
        """Bytes that can be allocated in all."""
        return self._end - self._start

    @property
    def used(self) -> int:
        """Bytes in use, extents that were freed under lease included."""
        return self._used_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest extent that can be allocated now."""
        if not self._bin_bits:
            return 0
        return max(self._free_by_start[offset] for offset in self._bins[self._bin_bits.bit_length() - 1])

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new extent of at least ``nbytes``; None if no hole is large enough now.

        Raises InvalidInputError below 1 byte.
        """
        if nbytes < 1:
            raise InvalidInputError(f"an extent has at least 1 byte, not {nbytes}")
        size = -(-nbytes // self._align) * self._align
        offset = self._find(size)
        if offset is None:
            return None
        self._take(offset, size)
        return offset

    def _take(self, offset: int, size: int) -> None:
        """Turn the first ``size`` bytes of the hole at ``offset`` into an extent in use."""
        hole = self._remove_free(offset)
        if hole > size:
            self._add_free(offset + size, hole - size)
        self._used[offset] = size
        self._used_bytes += size

    def allocate_pieces(self, nbytes: int, most: int) -> list[tuple[int, int]] | None:
        """Allocate at most ``most`` extents of ``nbytes`` in total, in the largest holes; return their (offset, bytes).

        The last piece may be shorter than its extent. Returns None if there are too few free bytes, or the holes are
        too small.
        """
        left = -(-nbytes // self._align) * self._align
        if left > self.capacity - self._used_bytes:
            return None
        pieces: list[tuple[int, int]] = []
        while left:
            offset = self._find(left)
            if offset is None:
                offset = next(iter(self._bins[self._bin_bits.bit_length() - 1]))
            if len(pieces) == most:
                for taken, _ in pieces:
                    self._recycle(taken)
                return None
            size = min(self._free_by_start[offset], left)
            self._take(offset, size)
            pieces.append((offset, size))
            left -= size
        offset, size = pieces[-1]
        pieces[-1] = (offset, size - -nbytes % self._align)
        return pieces

    def adopt(self, extents: Iterable[tuple[int, int]]) -> None:
        """Take these (offset, bytes) as allocated; for an allocator that has allocated nothing yet.

        Raises InvalidInputError if they overlap or cannot have come from such an allocator.
        """
        if self._used:
            raise InvalidInputError("extents can only be adopted by an empty allocator")
        self._remove_free(self._start)
        end = self._start
        for offset, nbytes in sorted(extents):
            size = -(-nbytes // self._align) * self._align
            if nbytes < 1 or offset < end or offset % self._align or offset + size > self._end:
                raise InvalidInputError(f"an extent of {nbytes} bytes cannot lie at offset {offset}")
            if offset > end:
                self._add_free(end, offset - end)
            self._used[offset] = size
            self._used_bytes += size
            end = offset + size
        if end < self._end:
            self._add_free(end, self._end - end)

    def free(self, offset: int) -> bool:
        """Give an extent back. False: it is under lease and will be recycled when the last lease ends.

        Raises InvalidInputError if no extent starts at ``offset`` or it was freed before.
        """
        if offset not in self._used or offset in self._doomed:
            raise InvalidInputError(f"no extent in use starts at offset {offset}")
        if offset in self._leased:
            self._doomed[offset] = self._used[offset]
            return False
        self._recycle(offset)
        return True

    def lease(self, offsets: Iterable[int]) -> int:
        """Keep these extents from being recycled until ``release`` of the returned number.

        Raises InvalidInputError, with nothing leased, if one of them is not in use or was freed.
        """
        held = tuple(offsets)
        for offset in held:
            if offset not in self._used or offset in self._doomed:
                raise InvalidInputError(f"no extent in use starts at offset {offset}")
        for offset in held:
            self._leased[offset] = self._leased.get(offset, 0) + 1
        lease = next(self._lease_numbers)
        self._leases[lease] = held
        return lease

    def is_leased(self, offset: int) -> bool:
        """Return whether the extent at ``offset`` is under lease now."""
        return offset in self._leased

    def release(self, lease: int) -> int:
        """End a lease; the bytes recycled by that. Raises InvalidInputError for an unknown or ended lease."""
        held = self._leases.pop(lease, None)
        if held is None:
            raise InvalidInputError(f"lease {lease} is unknown or has ended")
        recycled = 0
        for offset in held:
            left = self._leased[offset] - 1
            if left:
                self._leased[offset] = left
                continue
            del self._leased[offset]
            if offset in self._doomed:
                recycled += self._doomed.pop(offset)
                self._recycle(offset)
        return recycled

    def size(self, offset: int) -> int:
        """Bytes of the extent at ``offset``. Raises InvalidInputError if there is none."""
        size = self._used.get(offset)
        if size is None:
            raise InvalidInputError(f"no extent in use starts at offset {offset}")
        return size

    def stats(self) -> ExtentsStats:
        """Counts as of now."""
        return ExtentsStats(
            capacity=self.capacity,
            used=self._used_bytes,
            free=self.capacity - self._used_bytes,
            largest_free=self.largest_free,
            extents=len(self._used),
            leases=len(self._leases),
            leased_bytes=sum(self._doomed.values()),
        )

    def _recycle(self, offset: int) -> None:
        size = self._used.pop(offset)
        self._used_bytes -= size
        after = offset + size
        if after in self._free_by_start:
            size += self._remove_free(after)
        if offset in self._free_by_end:
            before = self._free_by_end[offset]
            size += self._remove_free(before)
            offset = before
        self._add_free(offset, size)

    def _find(self, size: int) -> int | None:
        own = self._class_of(size)
        # Recycled extents are mostly of the sizes asked for, so a hole of the same class often fits exactly.
        first = next(iter(self._bins.get(own, ())), None)
        if first is not None and self._free_by_start[first] >= size:
            return first
        larger = self._bin_bits >> (own + 1)
        if larger:
            number = own + 1 + (larger & -larger).bit_length() - 1
            return next(iter(self._bins[number]))
        # Only holes of the same class are left; some may be just large enough.
        return next((offset for offset in self._bins.get(own, ()) if self._free_by_start[offset] >= size), None)

    def _class_of(self, size: int) -> int:
        units = size // self._align
        power = units.bit_length() - 1
        if power < CLASSES_LOG2:
            return units
        return ((power - CLASSES_LOG2 + 1) << CLASSES_LOG2) + ((units >> (power - CLASSES_LOG2)) - (1 << CLASSES_LOG2))

    def _add_free(self, offset: int, size: int) -> None:
        self._free_by_start[offset] = size
        self._free_by_end[offset + size] = offset
        number = self._class_of(size)
        self._bins.setdefault(number, {})[offset] = None
        self._bin_bits |= 1 << number

    def _remove_free(self, offset: int) -> int:
        size = self._free_by_start.pop(offset)
        del self._free_by_end[offset + size]
        number = self._class_of(size)
        holes = self._bins[number]
        del holes[offset]
        if not holes:
            self._bin_bits &= ~(1 << number)
        return size
