"""The memory of clients whose connection ended while they may still touch it."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.base import StoreContext
from transfer_queue.storage.memory import unit
from transfer_queue.storage.memory.arena import ArenaFile
from transfer_queue.storage.memory.liveness import drop_lock, take_lock
from transfer_queue.storage.memory.spill import Spill, SpillFile
from transfer_queue.wire import messages as wire

KIB = 1 << 10


@dataclass(frozen=True)
class Peer:
    client_id: str
    writer: int


async def test_a_block_that_is_filled_while_its_writer_leaves_goes_with_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = ArenaFile(1 << 20, str(tmp_path / "arena"))
    context = StoreContext(name="u", capacity=1 << 20, settings={}, directory=str(tmp_path))
    store = unit.MemoryStore(context, arena, spill=Spill(SpillFile(tmp_path), 1, print))
    leaving, other = Peer("leaving", 1), Peer("other", 2)
    lock = store.connected(leaving)["lock"]
    store.connected(other)
    blocks = [2 << 32 | number for number in range(16)]
    for block in blocks:
        store.serve(other, wire.Put(block, 0.0), memoryview(bytes(64 * KIB)))
    await store.free(blocks[::2])  # holes of 64 KiB
    held = os.open(tmp_path / "arena", os.O_RDWR)
    take_lock(held, lock)  # the writer may still touch the memory
    number, size = 1 << 32 | 1, 200 * KIB
    store.serve(leaving, wire.Alloc(number, size, 0.0, "", pieces=True), None)
    store.receive_buffer(leaving, wire.Fill(number), size)
    copying, scatter = threading.Event(), unit.scatter
    monkeypatch.setattr(unit, "scatter", lambda *given: copying.wait() and scatter(*given))
    answer = store.serve(leaving, wire.Fill(number), memoryview(bytes(size)))
    assert asyncio.iscoroutine(answer)
    filling = asyncio.create_task(answer)
    await asyncio.sleep(0)  # the copy is under way
    store.disconnected(leaving)
    copying.set()
    with pytest.raises(StorageKeyNotFoundError, match=r"the writer of block .* is gone"):
        await filling
    assert not store._blocks[number].sealed
    drop_lock(held, lock)
    os.close(held)
    assert store._ghosts._timer is not None
    store._ghosts._timer.cancel()
    store._ghosts.check()
    assert number not in store._blocks
    assert not list(store._ghosts)
    assert store._extents.used == 8 * 64 * KIB
    await store.close()
