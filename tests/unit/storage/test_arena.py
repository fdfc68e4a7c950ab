"""The arena file: mapped, shared, faulted in, removed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.storage.memory.arena import DATA_START, SLICE_BYTES, ArenaFile, attach_arena, populate


def resident_bytes(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_what_is_written_through_one_mapping_is_read_through_another() -> None:
    arena = ArenaFile(1 << 20)
    mapped = attach_arena(arena.path, arena.nbytes, arena.nonce)
    assert mapped is not None
    arena.memory[DATA_START : DATA_START + 5] = b"hello"
    assert mapped[DATA_START : DATA_START + 5] == b"hello"
    mapped.close()
    arena.close()


def test_another_process_can_attach() -> None:
    arena = ArenaFile(1 << 20)
    arena.memory[DATA_START : DATA_START + 5] = b"hello"
    code = (
        "import sys; from transfer_queue.storage.memory.arena import attach_arena as a;"
        "m = a(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])); m[4096:4101] = m[4096:4101].upper()"
    )
    command = [sys.executable, "-c", code, str(arena.path), str(arena.nbytes), arena.nonce.hex()]
    subprocess.run(command, check=True, timeout=60)
    assert bytes(arena.memory[DATA_START : DATA_START + 5]) == b"HELLO"
    arena.close()


def test_a_copy_into_populated_memory_meets_no_page_faults() -> None:
    arena = ArenaFile(16 << 20)
    arena.start_prefault()
    assert arena.wait_prefaulted(60)
    mapped = attach_arena(arena.path, arena.nbytes, arena.nonce)
    assert mapped is not None
    half, data = 8 << 20, b"\1" * (8 << 20)
    with memoryview(mapped) as memory:

        def faults(start: int) -> int:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            memory[start : start + half] = data
            return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

        populate(memory[100:half])
        assert faults(0) < 8 < half // (2 << 20) * 4 <= faults(half), "of 4 KiB, or of 2 MiB"
    mapped.close()
    arena.close()


def test_attach_refuses_what_is_not_this_arena(tmp_path: Path) -> None:
    arena = ArenaFile(1 << 20)
    assert attach_arena(arena.path, arena.nbytes, b"0" * 16) is None
    assert attach_arena(arena.path, arena.nbytes + 4096, arena.nonce) is None
    assert attach_arena(tmp_path / "absent", arena.nbytes, arena.nonce) is None
    arena.close()
    assert attach_arena(arena.path, arena.nbytes, arena.nonce) is None


def test_prefaulting_makes_every_page_resident_and_keeps_contents() -> None:
    arena = ArenaFile(2 * SLICE_BYTES)
    arena.memory[-5:] = b"kept!"
    steps: list[tuple[int, int]] = []
    arena.start_prefault(lambda done, total: steps.append((done, total)))
    assert arena.wait_prefaulted(60)
    assert resident_bytes(arena.path) == arena.nbytes == arena.prefaulted
    assert steps[-1] == (arena.nbytes, arena.nbytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert len(steps) == 3
    assert bytes(arena.memory[-5:]) == b"kept!"
    arena.close()


def test_prefaulting_stops_when_the_arena_is_closed() -> None:
    arena = ArenaFile(8 * SLICE_BYTES)
    first, closing = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        first.set()
        closing.wait(60)

    arena.start_prefault(progress)
    assert first.wait(60)
    arena._stop.set()
    closing.set()
    arena.close()
    assert arena.prefaulted == SLICE_BYTES


def test_close_removes_the_file_and_leaves_views_readable() -> None:
    arena = ArenaFile(1 << 20)
    view = arena.memory[DATA_START : DATA_START + 4]
    view[:] = b"data"
    arena.close()
    arena.close()
    assert not arena.path.exists()
    assert bytes(view) == b"data"


def test_too_little_room_is_named_with_path_and_size(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    needed = (room.f_bavail * room.f_frsize) + (1 << 30)
    with pytest.raises(StartError, match=r"MiB free.*needs \d+ MiB: lower the storage capacity .*--shm-size") as raised:
        ArenaFile(needed, tmp_path / "arena")
    assert str(tmp_path / "arena") in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"someone else's")
    with pytest.raises(StartError, match=r"cannot create the arena .*File exists"):
        ArenaFile(1 << 20, path)
    assert path.read_bytes() == b"someone else's"
