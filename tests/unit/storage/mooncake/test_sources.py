"""What of a put is sent from where it lies, and what is packed."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.storage.mooncake.buffers import Bytes, merged_spans
from transfer_queue.storage.mooncake.parts import parts_of
from transfer_queue.storage.mooncake.sources import IN_PLACE_BYTES, in_place

KIB = 1 << 10
MIB = 1 << 20


def joined(pieces: list[Bytes]) -> Bytes:
    return np.concatenate(pieces)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([64, 5 * KIB, 700 * KIB, MIB, 3 * MIB]), min_size=1, max_size=8),
    part_kib=st.sampled_from([96, 1000, 2500]),
    groups=st.integers(1, 3),
)
def test_parts_are_the_segments_one_after_the_other(sizes: list[int], part_kib: int, groups: int) -> None:
    segments = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    parts = parts_of("run", 1, sum(sizes), part_kib * KIB)
    left = deque(segments)
    got: list[Bytes] = []
    bounds = [len(parts) * number // groups for number in range(groups + 1)]
    for start, stop in itertools.pairwise(bounds):
        if start == stop:
            continue
        source = in_place(parts[start:stop], left)
        buffer = np.full(source.buffer_bytes, 255, np.uint8)
        source.fill(buffer)
        values = source.values(buffer)
        assert list(values) == [part.key for part in parts[start:stop]]
        for part in parts[start:stop]:
            got.append(joined(values[part.key]))
            assert got[-1].nbytes == part.nbytes
    assert not left
    np.testing.assert_array_equal(joined(got), joined(segments))


def test_long_segments_stay_where_they_are_and_the_rest_is_packed_in_one_piece_between_them() -> None:
    long = [np.zeros(3 * MIB, np.uint8), np.ones(2 * MIB, np.uint8)]
    short = [np.full(100, number, np.uint8) for number in (2, 3, 4)]
    segments = [short[0], long[0], short[1], short[2], long[1]]
    [part] = parts_of("run", 1, sum(segment.nbytes for segment in segments), 64 * MIB)
    source = in_place([part], deque(segments))
    assert source.buffer_bytes == 300
    buffer = np.empty(300, np.uint8)
    pieces = source.values(buffer)[part.key]
    assert [piece.nbytes for piece in pieces] == [100, 3 * MIB, 200, 2 * MIB]
    assert [np.shares_memory(piece, buffer) for piece in pieces] == [True, False, True, False]
    assert np.shares_memory(pieces[1], long[0])
    assert np.shares_memory(pieces[3], long[1])


def test_a_put_of_any_size_has_few_pieces() -> None:
    one = np.zeros(IN_PLACE_BYTES, np.uint8)
    segments = deque([one, one[:64]] * 1000)
    parts = parts_of("run", 1, sum(segment.nbytes for segment in segments), 64 * MIB)
    values = in_place(parts, segments).values(np.empty(0, np.uint8))
    assert sum(len(pieces) for pieces in values.values()) <= 1000


def test_memory_that_overlaps_is_registered_once() -> None:
    assert merged_spans([(300, 50), (100, 100), (150, 20), (190, 30), (220, 10)]) == [(100, 120), (220, 10), (300, 50)]
