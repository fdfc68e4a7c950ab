"""The block index of an arena that outlives its unit: what it says after any end, and after damage."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.storage.memory.index import HEADER_BYTES, RECORD_BYTES, BlockIndex, Place

CAPACITY = 1 << 20


def one(offset: int, nbytes: int) -> tuple[tuple[int, int]]:
    return ((offset, nbytes),)


def opened(path: Path, said: list[str] | None = None) -> BlockIndex:
    return BlockIndex(path, CAPACITY, "0123456789abcdef", (said if said is not None else []).append)


def written(path: Path) -> dict[int, Place]:
    """Seven blocks, two of them gone again and one not finished."""
    index = opened(path)
    for number in range(6):
        index.sealed(number, one(4096 + 64 * number, 60))
    index.allocated(6, one(8192, 1000))
    for number in (1, 3):
        index.dropped(number)
    index.write()
    index.close()
    return {
        **{number: Place(one(4096 + 64 * number, 60), True) for number in (0, 2, 4, 5)},
        6: Place(one(8192, 1000), False),
    }


def test_blocks_in_pieces_come_back_as_long_as_all_records_of_one_of_their_notes_are_whole(tmp_path: Path) -> None:
    path, said = tmp_path / "a.index", list[str]()
    index = opened(path)
    pieces = ((4096, 128), (8192, 64), (4352, 100))
    index.sealed(1, one(4224, 60))
    start = path.stat().st_size
    index.allocated(2, pieces)
    index.sealed(2, pieces)
    index.close()
    data = path.read_bytes()
    for place in range(start, len(data), RECORD_BYTES):
        path.write_bytes(data[: place + 5] + bytes([data[place + 5] ^ 1]) + data[place + 6 :])
        again = opened(path, said)
        in_second = place >= start + (len(pieces) + 1) * RECORD_BYTES
        expected = {} if in_second and place != len(data) - RECORD_BYTES else {2: Place(pieces, not in_second)}
        assert again.blocks == {1: Place(one(4224, 60), True)} | expected
        again.close()
    assert len(said) == 2 * (len(pieces) + 1)
    path.write_bytes(data)
    again = opened(path)
    assert again.blocks == {1: Place(one(4224, 60), True), 2: Place(pieces, True)}
    again.close()


def test_blocks_come_back_with_the_identity_of_the_memory(tmp_path: Path) -> None:
    blocks = written(tmp_path / "a.index")
    again = BlockIndex(tmp_path / "a.index", CAPACITY, "another identity", [].append)
    assert (again.blocks, again.incarnation, again.life) == (blocks, "0123456789abcdef", 2)
    again.close()


def test_an_index_cut_at_any_byte_holds_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    written(path)
    data = path.read_bytes()
    for cut in range(HEADER_BYTES, len(data)):
        path.write_bytes(data[:cut])
        expected: dict[int, Place] = {}
        for record in range((cut - HEADER_BYTES) // RECORD_BYTES):
            if record < 6:
                expected[record] = Place(one(4096 + 64 * record, 60), True)
            elif record == 6:
                expected[6] = Place(one(8192, 1000), False)
            else:
                del expected[(1, 3)[record - 7]]
        index = opened(path)
        assert index.blocks == expected, cut
        index.close()


def test_a_flipped_bit_costs_at_most_the_block_of_its_record_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    blocks = written(path)
    data = path.read_bytes()
    for place in range(HEADER_BYTES, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        said: list[str] = []
        index = opened(path, said)
        assert len(said) == 1
        assert str(path) in said[0]
        differing = {number for number in range(7) if index.blocks.get(number) != blocks.get(number)}
        assert len(differing) <= 1, place
        index.close()


def test_a_damaged_header_or_another_capacity_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    written(path)
    data = path.read_bytes()
    with pytest.raises(StartError, match="set it back"):
        BlockIndex(path, 2 * CAPACITY, "0" * 16, [].append)
    for place in range(HEADER_BYTES):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StartError, match="to start empty"):
            opened(path)


def test_a_block_whose_freeing_is_damaged_yields_to_the_one_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    index = opened(path)
    index.sealed(1, one(4096, 100))
    index.dropped(1)
    index.sealed(2, one(4096 + 64, 100))
    index.close()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + RECORD_BYTES + 5] ^= 1
    path.write_bytes(data)
    again = opened(path, [])
    assert again.blocks == {2: Place(one(4096 + 64, 100), True)}
    again.close()


def test_the_index_does_not_grow_with_blocks_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    index = opened(path)
    for number in range(20_000):
        index.sealed(number, one(4096, 64))
        index.dropped(number)
    index.sealed(20_000, one(4096, 64))
    assert path.stat().st_size < 10_000 * RECORD_BYTES
    index.close()
    again = opened(path)
    assert again.blocks == {20_000: Place(one(4096, 64), True)}
    again.close()


SCOPES = ["team-a/train", "team-b/" + 40 * "long ", "", "team-ä/\udc80"]


def scoped(path: Path) -> dict[int, Place]:
    index = opened(path)
    for number in range(12):
        index.sealed(number, one(4096 + 64 * number, 60), SCOPES[number % 4])
    index.allocated(12, one(8192, 64), "team-c/")
    index.close()
    return {
        **{number: Place(one(4096 + 64 * number, 60), True, SCOPES[number % 4]) for number in range(12)},
        12: Place(one(8192, 64), False, "team-c/"),
    }


def test_blocks_come_back_with_their_partitions_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    blocks = scoped(path)
    for _ in range(3):  # each start writes the file anew
        index = opened(path)
        assert index.blocks == blocks
        index.close()


def test_damage_never_gives_a_block_to_another_partition(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    blocks = scoped(path)
    data = path.read_bytes()
    for place in range(HEADER_BYTES, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        said: list[str] = []
        index = opened(path, said)
        assert len(said) == 1
        for number, found in index.blocks.items():
            assert found in (blocks[number], blocks[number]._replace(scope="")), place
        nameless = sum(found.scope != blocks[number].scope for number, found in index.blocks.items())
        assert ("prefix ''" in said[0]) == (nameless > 0)
        index.close()


@contextmanager
def full_disk_at(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_and_what_comes_when_there_is_room_again_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    index = opened(path)
    index.sealed(1, one(4096, 60))
    for fits in range(RECORD_BYTES):
        with full_disk_at(path.stat().st_size + fits), pytest.raises(OSError, match="File too large"):
            index.sealed(2, one(4096 + 64, 60), "team-a/")
        index.dropped(2)
    index.sealed(3, one(4096 + 64, 60), "team-a/")
    index.close()
    again = opened(path)
    assert again.blocks == {1: Place(one(4096, 60), True), 3: Place(one(4096 + 64, 60), True, "team-a/")}
    again.close()


def test_a_log_that_is_written_anew_while_it_is_synced_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = BlockIndex(tmp_path / "u.index", 1 << 20, "0" * 16, print)
    index.sealed(1, one(0, 64))
    real = os.fdatasync

    def sync(file: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)
        index._rewrite()
        real(file)

    monkeypatch.setattr(os, "fdatasync", sync)
    index.sync()

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="the disk does not answer"):
        index.sync()
    index.close()
