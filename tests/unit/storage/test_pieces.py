"""Blocks that find no hole large enough lie in several."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_until
from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.column import ColumnView
from transfer_queue.config.processes import Durability
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import CapacityError, RequestError, StorageKeyNotFoundError
from transfer_queue.storage.base import StoreContext
from transfer_queue.storage.memory.unit import MemoryStore, open_store
from transfer_queue.wire import messages as wire

CAPACITY = 8 << 20
WRITER = 7 << 32


@dataclass(eq=False)
class Peer:
    client_id: str = "c"
    writer: int = 7


async def start(directory: Path, durability: Durability = "none", **settings: Any) -> tuple[MemoryStore, Peer]:
    store = await open_store(StoreContext("u0", CAPACITY, {"prefault": False, **settings}, str(directory), durability))
    peer = Peer()
    store.connected(peer)
    return store, peer


async def ask(store: MemoryStore, peer: Peer, message: Any, payload: bytes | None = None) -> Any:
    """The answer and its payload in one piece."""
    served = store.serve(peer, message, None if payload is None else memoryview(payload))
    served = served if not asyncio.iscoroutine(served) else await served
    assert not asyncio.iscoroutine(served)
    data = b"".join(served.payload)
    if served.sent is not None:
        served.sent()
    return served.reply, data


async def put(store: MemoryStore, peer: Peer, number: int, data: bytes) -> bool:
    """As a client on this host does; whether it had to send the block."""
    extent, _ = await ask(store, peer, wire.Alloc(number, len(data), pieces=True))
    if extent.offset >= 0:
        store._file.memory[extent.offset : extent.offset + len(data)] = data
        await ask(store, peer, wire.Seal(number))
        return False
    assert store.receive_buffer(peer, wire.Fill(number), len(data)) is None
    await ask(store, peer, wire.Fill(number), data)
    return True


async def read(store: MemoryStore, peer: Peer, number: int) -> bytes:
    opened, data = await ask(store, peer, wire.Open([number]))
    ((offset, nbytes),) = opened.extents
    if opened.lease:
        data = bytes(store._file.memory[offset : offset + nbytes])
        store.notice(peer, wire.Release(opened.lease))
        return data
    return bytes(data[offset : offset + nbytes])


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


async def filled(store: MemoryStore, peer: Peer, hole: int = 65536) -> int:
    """Every other hole of ``hole`` bytes is free; the number of the first block that is not used."""
    count = CAPACITY // hole
    for number in range(count):
        await put(store, peer, WRITER + number, bytes(hole))
    await store.free([WRITER + number for number in range(0, count, 2)])
    return WRITER + count


@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_twentieth_of_a_unit_is_taken_at_95_percent_after_any_history_of_clears(
    tmp_path: Path, seed: int, durability: Durability
) -> None:
    store, peer = await start(tmp_path, durability)
    draw, live, number, sent = random.Random(seed), dict[int, int](), WRITER, 0
    twentieth = CAPACITY // 20 // 64 * 64
    for _ in range(6):
        while store.stats().used < CAPACITY - twentieth:
            size = int(2 ** draw.uniform(10, 19))
            size = min(-(-size // 64) * 64, CAPACITY - twentieth - store.stats().used)
            number += 1
            sent += await put(store, peer, number, content(number, size))
            live[number] = size
        assert store.stats().used / CAPACITY > 0.949
        number += 1
        sent += await put(store, peer, number, content(number, twentieth))
        assert await read(store, peer, number) == content(number, twentieth)
        await store.free([number])
        cleared = draw.sample(sorted(live), len(live) // 2)
        await store.free(cleared)
        for each in cleared:
            del live[each]
        if durability == "process":
            await store.close()
            store, peer = await start(tmp_path, durability)
            assert sorted(await store.inventory()) == sorted(live)
            store._ghosts.check()
        for each, size in live.items():
            assert await read(store, peer, each) == content(each, size)
    assert sent > 5
    await store.free(sorted(live))
    assert store.stats().used == 0
    await store.close()


async def test_rows_and_fields_of_a_block_in_pieces_are_read_over_the_network(tmp_path: Path) -> None:
    store, peer = await start(tmp_path)
    number = await filled(store, peer)
    values = np.arange(400_000, dtype="<i4")
    column = ColumnView(FieldSchema("x", "dense", "int32", (1000,)), 400, [values.view(np.uint8)], None)
    block = EncodedBlock(400, [column]).to_bytes()
    assert await put(store, peer, number, bytes(block))
    sizes, data = await ask(store, peer, wire.Read([wire.ReadPart(number, ["x"], (7, 9)), wire.ReadPart(number)]))
    part = BlockView(data[: sizes.sizes[0]]).column("x")
    assert part.rows == 2
    assert data[sizes.sizes[0] :] == block
    assert np.array_equal(np.frombuffer(part.buffers()[0][0].data, "<i4"), values[7000:9000])
    await store.close()


async def test_what_a_lost_writer_was_sending_is_recycled_once_it_is_copied(tmp_path: Path) -> None:
    store, peer = await start(tmp_path)
    number = await filled(store, peer)
    used = store.stats().used
    for lose in (lambda: store.notice(peer, wire.Abort(number)), lambda: store.disconnected(peer)):
        await ask(store, peer, wire.Alloc(number, 1 << 20, pieces=True))
        store.receive_buffer(peer, wire.Fill(number), 1 << 20)
        filling = asyncio.ensure_future(ask(store, peer, wire.Fill(number), bytes(1 << 20)))
        await asyncio.sleep(0)
        lose()
        with pytest.raises(StorageKeyNotFoundError):
            await filling
        wait_until(lambda: store.stats().used == used, "its pieces are free")
    await store.close()


async def test_a_client_that_knows_nothing_of_pieces_gets_none_and_the_error_says_how_the_free_bytes_lie(
    tmp_path: Path,
) -> None:
    store, peer = await start(tmp_path)
    number = await filled(store, peer)
    used = CAPACITY // 2
    with pytest.raises(
        CapacityError,
        match=rf"{used} of {CAPACITY} bytes are used, {used} are free, 65536 of them in the largest piece \(c wrote",
    ):
        await ask(store, peer, wire.Alloc(number, 1 << 20))
    await ask(store, peer, wire.Alloc(number, 1 << 20, pieces=True))
    with pytest.raises(RequestError, match="lies in pieces"):
        await ask(store, peer, wire.Seal(number))
    await store.close()


async def test_blocks_in_pieces_move_to_the_disk_like_others(tmp_path: Path) -> None:
    spill = {"enabled": True, "path": str(tmp_path / "disk"), "thresholdBytes": 1 << 20}
    store, peer = await start(tmp_path, ssdOffload=spill)
    number = await filled(store, peer)
    for each in range(8):
        await put(store, peer, number + each, content(each, 1 << 20))
    assert store.spill is not None
    assert store.spill.blocks > 3
    for each in range(8):
        assert await read(store, peer, number + each) == content(each, 1 << 20)
    await store.close()
