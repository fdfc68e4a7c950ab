"""What a client gives up on leaves nothing on a storage unit, whenever it does."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from tests.waiting import until
from transfer_queue.errors import CapacityError, ConnectionLostError, RequestError
from transfer_queue.runtime.block_server import BlockServer
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.storage.base import BackendContext, BlockRead, StoreContext, UnitInfo
from transfer_queue.storage.conformance.blocks import block_of_bytes
from transfer_queue.storage.ledger import Ledger
from transfer_queue.storage.memory.client import INLINE_BYTES, MemoryBackend
from transfer_queue.storage.memory.unit import MemoryStore, open_store
from transfer_queue.wire import messages as wire

CAPACITY = 1 << 20
LARGE = 2 * INLINE_BYTES
BLOCK = 7 << 32
TURNS = 12
"""More turns of the loop than a request and its answer take."""
REPLIES = msgspec.msgpack.Decoder(wire.Envelope[wire.UnitReply])


@dataclass(eq=False)
class Peer:
    client_id: str = "c"
    writer: int = BLOCK >> 32


class Client:
    """A client's end of its connections."""

    def __init__(self) -> None:
        self.keepalive = Keepalive(60.0, 60.0)
        self.connections: list[Connection] = []

    async def connect(self, address: str) -> Connection:
        hello = wire.Hello("client", "c", writer=BLOCK >> 32)
        self.connections.append(
            await connect(address, hello, self, REPLIES, self.keepalive, what="storage unit", timeout_s=10.0)
        )
        return self.connections[-1]

    def on_request(self, *_: Any) -> None: ...
    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


async def run_here(work: Callable[[], Any]) -> Any:
    return work()


class Unit(NamedTuple):
    store: MemoryStore
    backend: MemoryBackend
    info: UnitInfo
    client: Client

    async def put(self, number: int, nbytes: int, wait_s: float = 0.0) -> int:
        return await self.backend.put(block_of_bytes(nbytes), BLOCK + number, self.info, wait_s=wait_s)


@asynccontextmanager
async def unit_of(folder: Path) -> AsyncIterator[Unit]:
    store = await open_store(StoreContext("u", CAPACITY, {"prefault": False}, str(folder)))
    client = Client()
    server = BlockServer(store, Keepalive(60.0, 60.0), lambda blocks: None)
    await server.listen("127.0.0.1", 0, None)
    backend = MemoryBackend(BackendContext("c", BLOCK >> 32, "r", {}, client.connect, run_here))
    try:
        yield Unit(store, backend, UnitInfo(1, "u", server.address, CAPACITY), client)
    finally:
        await backend.close()
        await server.close()
        await store.close()


async def cancelled_after(turns: int, work: Awaitable[Any]) -> Any:
    """What ``work`` gave, if it came to its end in so many turns of the loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        return await task


async def test_a_get_that_is_given_up_leaves_no_lease(tmp_path: Path) -> None:
    async with unit_of(tmp_path) as unit:
        await unit.put(1, LARGE)
        for turns in range(1, TURNS):
            fetched = await cancelled_after(turns, unit.backend.get([BlockRead(unit.info, BLOCK + 1)], timeout_s=10.0))
            if fetched is not None:
                fetched.release()
        await until(lambda: unit.store._extents.stats().leases == 0)


@pytest.mark.parametrize("nbytes", [1000, LARGE], ids=["within the message", "in place"])
async def test_a_put_that_is_given_up_leaves_no_block(tmp_path: Path, nbytes: int) -> None:
    async with unit_of(tmp_path) as unit:
        await unit.put(100, 1000)
        for turns in range(1, TURNS):
            if await cancelled_after(turns, unit.put(turns, nbytes)):
                await unit.backend.discard(BLOCK + turns, unit.info)
        await until(lambda: unit.store.stats().blocks == 1)


@pytest.mark.parametrize("turns", [0, 1], ids=["at once", "later"])
@pytest.mark.parametrize("inline", [True, False], ids=["within the message", "in place"])
async def test_a_put_that_is_given_up_while_it_waits_for_space_gets_none(
    tmp_path: Path, turns: int, inline: bool
) -> None:
    store, peer = await open_store(StoreContext("u", CAPACITY, {"prefault": False}, str(tmp_path))), Peer()
    store.connected(peer)
    store.serve(peer, wire.Alloc(BLOCK, CAPACITY), None)
    if inline:
        work = store.serve(peer, wire.Put(BLOCK + 1, 10.0), memoryview(bytes(1000)))
    else:
        work = store.serve(peer, wire.Alloc(BLOCK + 1, 1000, 10.0), None)
    putting = asyncio.ensure_future(cast(Any, work))
    for _ in range(turns):
        await asyncio.sleep(0)
    store.notice(peer, wire.Abort(BLOCK + 1))
    await asyncio.sleep(0)
    await store.free([BLOCK])
    with pytest.raises(RequestError, match="was given up"):
        await putting
    assert store.stats() == wire.UnitStats(CAPACITY, 0, 0)
    await store.close()


async def test_space_that_comes_for_a_writer_that_is_gone_goes_to_the_next(tmp_path: Path) -> None:
    store = await open_store(StoreContext("u", CAPACITY, {"prefault": False}, str(tmp_path)))
    first, second = Peer(), Peer(writer=8)
    store.connected(first)
    store.connected(second)
    store.serve(second, wire.Alloc((8 << 32) + 1, CAPACITY), None)
    waiting = [
        asyncio.ensure_future(cast(Any, store.serve(peer, wire.Alloc(peer.writer << 32, CAPACITY, 10.0), None)))
        for peer in (first, second)
    ]
    await asyncio.sleep(0)
    store.disconnected(first)
    await store.free([(8 << 32) + 1])
    with pytest.raises(RequestError, match="its writer is gone"):
        await waiting[0]
    await asyncio.wait_for(waiting[1], 1.0)
    await store.close()


async def test_a_backend_that_is_closed_while_it_connects_keeps_no_connection(tmp_path: Path) -> None:
    async with unit_of(tmp_path) as unit:
        before = len(os.listdir("/proc/self/fd"))
        putting = asyncio.ensure_future(unit.put(1, 1000))
        for _ in ("the call", "its attempt to connect"):
            await asyncio.sleep(0)
        await unit.backend.close()
        with pytest.raises(ConnectionLostError, match="is closed"):
            await putting
        assert all(connection.closed for connection in unit.client.connections)
        deadline = asyncio.get_running_loop().time() + 10
        while len(os.listdir("/proc/self/fd")) > before:
            assert asyncio.get_running_loop().time() < deadline, "a socket is left open"
            await asyncio.sleep(0.01)


async def test_an_arena_that_cannot_be_locked_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise OSError(errno.ENOLCK, "this file system has no locks")

    monkeypatch.setattr("transfer_queue.storage.memory.client.take_lock", refuse)
    async with unit_of(tmp_path) as unit:
        before = len(os.listdir("/proc/self/fd"))
        await unit.put(1, 1000)
        assert len(os.listdir("/proc/self/fd")) == before + 2  # the two ends of the connection


async def test_no_account_is_kept_of_what_was_given_up_while_it_waited_for_space() -> None:
    ledger = Ledger("u", 100)
    peer, again = Peer(), Peer()
    ledger.connected(peer)
    await ledger.alloc(peer, wire.Alloc(BLOCK + 1, 100))
    given_up = asyncio.ensure_future(ledger.alloc(peer, wire.Alloc(BLOCK + 2, 50, 10.0)))
    ledger.remove([BLOCK + 2])
    await asyncio.sleep(0)
    ledger.connected(again)  # the same client, over another connection
    over_it = asyncio.ensure_future(ledger.alloc(again, wire.Alloc(BLOCK + 3, 50, 10.0)))
    of_the_lost = asyncio.ensure_future(ledger.alloc(peer, wire.Alloc(BLOCK + 4, 50, 10.0)))
    await asyncio.sleep(0)
    ledger.disconnected(peer)
    ledger.recycle(ledger.remove([BLOCK + 1]))
    await asyncio.wait([given_up, over_it, of_the_lost])
    assert [isinstance(each.exception(), RequestError) for each in (given_up, over_it, of_the_lost)] == [
        True,
        False,
        True,
    ]
    assert list(ledger.entries) == [BLOCK + 3]
    with pytest.raises(CapacityError):
        await ledger.alloc(again, wire.Alloc(BLOCK + 5, 60))


async def test_who_waits_for_space_behind_others_waits_no_longer_than_it_said() -> None:
    ledger = Ledger("u", 100)
    peer = Peer()
    ledger.connected(peer)
    await ledger.alloc(peer, wire.Alloc(BLOCK + 1, 80))
    patient = asyncio.ensure_future(ledger.alloc(peer, wire.Alloc(BLOCK + 2, 50, 600.0)))
    await asyncio.sleep(0)
    for number, wait_s in ((3, 0.0), (4, 0.01)):
        with pytest.raises(CapacityError, match=f"within {wait_s:g} s"):
            await asyncio.wait_for(ledger.alloc(peer, wire.Alloc(BLOCK + number, 10, wait_s)), 10.0)
    ledger.recycle(ledger.remove([BLOCK + 1]))
    await asyncio.wait_for(patient, 10.0)
    assert list(ledger.entries) == [BLOCK + 2]
    assert ledger.stats().used == 50


async def test_a_small_block_does_not_overtake_a_large_one_that_waits_for_space() -> None:
    ledger = Ledger("u", 100)
    peer = Peer()
    ledger.connected(peer)
    await ledger.alloc(peer, wire.Alloc(BLOCK + 1, 80))
    large, small = (
        asyncio.ensure_future(ledger.alloc(peer, wire.Alloc(BLOCK + number, nbytes, 600.0)))
        for number, nbytes in ((2, 100), (3, 10))
    )
    await asyncio.sleep(0)
    ledger.recycle(ledger.remove([BLOCK + 1]))
    await asyncio.wait_for(large, 10.0)
    assert not small.done()
    ledger.recycle(ledger.remove([BLOCK + 2]))
    await asyncio.wait_for(small, 10.0)
    assert list(ledger.entries) == [BLOCK + 3]
