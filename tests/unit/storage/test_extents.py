"""The allocator of extents against a byte map, and the promises of leases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from transfer_queue.errors import InvalidInputError
from transfer_queue.storage.memory.extents import Extents

START, CAPACITY, ALIGN = 4096, 64 * 200, 64


class ExtentsAgainstByteMap(RuleBasedStateMachine):
    """The model: a list of blocks of ``ALIGN`` bytes, each None or the offset of the extent that owns it."""

    extents = Bundle("extents")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.real = Extents(CAPACITY, start=START, align=ALIGN)
        self.owner: list[int | None] = [None] * (CAPACITY // ALIGN)
        self.freed: set[int] = set()
        self.leased: dict[int, list[int]] = {}

    def holes(self) -> list[int]:
        text = "".join("." if owner is None else "x" for owner in self.owner)
        return [len(hole) * ALIGN for hole in text.split("x") if hole]

    def held(self, offset: int) -> bool:
        return any(offset in offsets for offsets in self.leased.values())

    def recycle(self, offset: int) -> None:
        self.freed.discard(offset)
        self.owner = [None if owner == offset else owner for owner in self.owner]

    def alive(self, offset: int) -> bool:
        return offset in self.owner and offset not in self.freed

    @rule(target=extents, nbytes=st.integers(1, 40 * ALIGN))
    def allocate(self, nbytes: int) -> int:
        offset = self.real.allocate(nbytes)
        size = -(-nbytes // ALIGN)
        if offset is None:
            assert max(self.holes(), default=0) < size * ALIGN
            return -1
        first = (offset - START) // ALIGN
        assert offset % ALIGN == 0
        assert first >= 0
        assert self.owner[first : first + size] == [None] * size
        self.owner[first : first + size] = [offset] * size
        return offset

    @rule(target=extents, nbytes=st.integers(1, 60 * ALIGN), most=st.integers(1, 8))
    def allocate_pieces(self, nbytes: int, most: int) -> MultipleResults[int]:
        pieces = self.real.allocate_pieces(nbytes, most)
        if pieces is None:
            # Holes of a size class count as equally large.
            assert sum(sorted(self.holes())[-most:]) * 16 // 17 < -(-nbytes // ALIGN) * ALIGN
            return multiple()
        assert len(pieces) <= most
        assert sum(size for _, size in pieces) == nbytes
        for offset, size in pieces:
            first, count = (offset - START) // ALIGN, -(-size // ALIGN)
            assert self.owner[first : first + count] == [None] * count
            self.owner[first : first + count] = [offset] * count
        return multiple(*(offset for offset, _ in pieces))

    @rule(offset=consumes(extents))
    def free(self, offset: int) -> None:
        if not self.alive(offset):
            with pytest.raises(InvalidInputError):
                self.real.free(offset)
        elif self.held(offset):
            assert self.real.free(offset) is False
            self.freed.add(offset)
        else:
            assert self.real.free(offset) is True
            self.recycle(offset)

    @rule(target=leases, offsets=st.lists(extents, max_size=4))
    def lease(self, offsets: list[int]) -> int:
        if not all(self.alive(offset) for offset in offsets):
            with pytest.raises(InvalidInputError):
                self.real.lease(offsets)
            return -1
        lease = self.real.lease(offsets)
        self.leased[lease] = offsets
        return lease

    @rule(lease=leases)
    def release(self, lease: int) -> None:
        if lease not in self.leased:
            with pytest.raises(InvalidInputError):
                self.real.release(lease)
            return
        offsets = self.leased.pop(lease)
        before = self.owner.count(None)
        for offset in set(offsets):
            if offset in self.freed and not self.held(offset):
                self.recycle(offset)
        assert self.real.release(lease) == (self.owner.count(None) - before) * ALIGN

    @precondition(lambda self: not any(self.owner))
    @rule()
    def empty_arena_is_one_hole(self) -> None:
        assert self.real.largest_free == CAPACITY

    @invariant()
    def counts_match_the_map(self) -> None:
        stats = self.real.stats()
        assert stats.free == self.owner.count(None) * ALIGN
        assert stats.used + stats.free == stats.capacity == CAPACITY
        assert stats.largest_free == max(self.holes(), default=0)
        assert stats.leases == len(self.leased)
        assert stats.leased_bytes == sum(self.owner.count(offset) * ALIGN for offset in self.freed)
        expected = 1 - stats.largest_free / stats.free if stats.free else 0
        assert stats.fragmentation == pytest.approx(expected)


TestExtentsAgainstByteMap = ExtentsAgainstByteMap.TestCase
TestExtentsAgainstByteMap.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_an_extent_freed_under_two_leases_is_recycled_by_the_last() -> None:
    extents = Extents(4096)
    offset = extents.allocate(4096)
    assert offset is not None
    first, second = extents.lease([offset]), extents.lease([offset])
    assert extents.free(offset) is False
    assert extents.release(first) == 0
    assert extents.allocate(64) is None
    assert extents.release(second) == 4096
    assert extents.allocate(4096) == offset


def test_a_freed_extent_cannot_be_leased_or_freed_again() -> None:
    extents = Extents(4096)
    offset = extents.allocate(64)
    assert offset is not None
    lease = extents.lease([offset])
    extents.free(offset)
    with pytest.raises(InvalidInputError, match="no extent in use"):
        extents.lease([offset])
    with pytest.raises(InvalidInputError, match="no extent in use"):
        extents.free(offset)
    extents.release(lease)
    with pytest.raises(InvalidInputError, match="no extent in use"):
        extents.size(offset)


def test_offsets_beyond_4_gib_are_exact() -> None:
    extents = Extents(1 << 44, align=4096)
    first, second = extents.allocate((1 << 43) + 1), extents.allocate(5)
    assert (first, second) == (0, (1 << 43) + 4096)


@pytest.mark.parametrize(("capacity", "align"), [(0, 64), (63, 64), (4096, 48), (4096, 0)])
def test_impossible_arenas_are_refused(capacity: int, align: int) -> None:
    with pytest.raises(InvalidInputError):
        Extents(capacity, align=align)


def test_an_extent_of_no_bytes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 1 byte"):
        Extents(4096).allocate(0)
