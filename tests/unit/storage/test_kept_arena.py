"""A memory unit that takes up the arena of the one before it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import wait_until
from transfer_queue.errors import StartError
from transfer_queue.storage.base import Served, StoreContext
from transfer_queue.storage.memory.liveness import take_lock
from transfer_queue.storage.memory.unit import MemoryStore, open_store
from transfer_queue.wire import messages as wire

BLOCK = 7 << 32


@dataclass(eq=False)
class Peer:
    client_id: str = "c"
    writer: int = 7


async def start(directory: Path) -> MemoryStore:
    context = StoreContext("u0", 1 << 20, {"prefault": False}, str(directory), "process")
    return await open_store(context)


async def crash(store: MemoryStore) -> None:
    """As a kill leaves it: nothing is written any more; locks and descriptors are gone."""
    await store.close()


def put(store: MemoryStore, peer: Peer, block: int, data: bytes) -> None:
    assert isinstance(store.serve(peer, wire.Put(block), memoryview(data)), Served)


def read(store: MemoryStore, peer: Peer, block: int) -> bytes:
    served = store.serve(peer, wire.Open([block]), None)
    assert isinstance(served, Served)
    return b"".join(served.payload)


async def test_sealed_blocks_are_readable_again_and_unfinished_ones_are_gone(tmp_path: Path) -> None:
    first = await start(tmp_path)
    peer = Peer()
    first.connected(peer)
    put(first, peer, BLOCK, b"kept")
    put(first, peer, BLOCK + 1, b"freed")
    first.serve(peer, wire.Alloc(BLOCK + 2, 100_000), None)
    await first.free([BLOCK + 1])
    incarnation = first.incarnation
    await crash(first)
    second = await start(tmp_path)
    assert await second.inventory() == [BLOCK]
    assert second.incarnation == incarnation
    assert second.stats().used == 64
    second.connected(peer)
    assert read(second, peer, BLOCK) == b"kept"
    await second.close()


async def test_what_a_client_of_the_former_process_may_touch_is_recycled_once_it_lets_go(tmp_path: Path) -> None:
    first = await start(tmp_path)
    peer = Peer()
    welcome = first.connected(peer)
    put(first, peer, BLOCK, b"being read")
    first.serve(peer, wire.Alloc(BLOCK + 1, 100), None)
    client = os.open(welcome["path"], os.O_RDWR)
    take_lock(client, welcome["lock"])
    await crash(first)
    second = await start(tmp_path)
    await second.free([BLOCK, BLOCK + 1])
    assert second.stats().used == 64 + 128
    os.close(client)
    second._ghosts.check()
    assert second.stats().used == 0
    await second.close()


async def test_locks_of_clients_of_different_processes_are_told_apart(tmp_path: Path) -> None:
    first = await start(tmp_path)
    peer = Peer()
    old = first.connected(peer)["lock"]
    put(first, peer, BLOCK, b"x")
    await crash(first)
    second = await start(tmp_path)
    assert second.connected(Peer())["lock"] > old
    client = os.open(tmp_path / "u0.arena", os.O_RDWR)
    take_lock(client, 1 << 40)  # of a client of this process: holds up nothing of the former one
    await second.free([BLOCK])
    wait_until(lambda: second.stats().used == 0, "the block is recycled")
    os.close(client)
    await second.close()


async def test_two_units_cannot_serve_one_arena(tmp_path: Path) -> None:
    first = await start(tmp_path)
    with pytest.raises(StartError, match="served by another process"):
        await start(tmp_path)
    await first.close()


async def test_files_of_something_else_are_refused_and_stay(tmp_path: Path) -> None:
    arena, index = tmp_path / "u0.arena", tmp_path / "u0.index"
    arena.write_text("of the user")
    with pytest.raises(StartError, match=f"{arena} is not an arena"):
        await start(tmp_path)
    assert arena.read_text() == "of the user"
    arena.unlink()
    index.write_text("of the user")
    with pytest.raises(StartError, match=f"{index} is not a block index"):
        await start(tmp_path)
    assert index.read_text() == "of the user"


async def test_an_index_of_an_earlier_arena_and_an_arena_that_was_begun_start_empty(tmp_path: Path) -> None:
    first = await start(tmp_path)
    peer = Peer()
    first.connected(peer)
    put(first, peer, BLOCK, b"gone with the arena")
    await crash(first)
    arena = tmp_path / "u0.arena"
    os.truncate(arena, 4096)  # killed once the header was written
    for lost in (lambda: None, arena.unlink, (tmp_path / "u0.index").unlink):
        lost()
        again = await start(tmp_path)
        assert await again.inventory() == []
        await crash(again)
