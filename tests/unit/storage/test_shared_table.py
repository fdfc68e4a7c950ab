"""Small blocks are read from shared memory without asking, and only as they were stored."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from transfer_queue.storage.base import StoreContext
from transfer_queue.storage.memory.shared_table import SharedBlockTable
from transfer_queue.storage.memory.unit import MemoryStore, open_store
from transfer_queue.wire import messages as wire

WRITER = 7


@dataclass(eq=False)
class Peer:
    client_id: str = "c"
    writer: int = WRITER


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * 32


def read(memory: memoryview, table: SharedBlockTable, number: int) -> Iterator[bytes | None]:
    """As a client of the host does it, in steps between which the unit works; the last one is what it read."""
    place = table.find(number)
    yield None
    if place is not None:
        half = place[1] // 2
        copy = bytes(memory[place[0] : place[0] + half])
        yield None
        copy += bytes(memory[place[0] + half : place[0] + place[1]])
        yield None
        if table.find(number) == place:
            yield copy


async def race(directory: Path, seed: int) -> int:
    """Reads during puts and frees of blocks that take each other's place; how many of them succeeded."""
    chance = random.Random(seed)
    store = await open_store(StoreContext("u0", 4096, {"prefault": False}, str(directory)))
    assert isinstance(store, MemoryStore)
    peer = Peer()
    attributes = store.connected(peer)
    memory = store._file.memory
    table = SharedBlockTable(memory[attributes["table"] :])
    held: list[int] = []
    number, good = WRITER << 32, 0
    reads: dict[int, Iterator[bytes | None]] = {}
    for _ in range(300):
        what = chance.random()
        if what < 0.4 and len(held) < 12:
            number += 1
            store.serve(peer, wire.Put(number), memoryview(content(number)))
            held.append(number)
        elif what < 0.6 and held:
            await store.free([held.pop(chance.randrange(len(held)))])
        elif held:
            wanted = chance.choice(held)
            reads.setdefault(wanted, read(memory, table, wanted))
        for wanted in [wanted for wanted in reads if chance.random() < 0.5]:
            found = next(reads[wanted], b"")  # b"": it ended without
            if found is not None:
                del reads[wanted]
                assert found in (b"", content(wanted))
                good += found != b""
    table.release()
    await store.close()
    return good


def test_a_read_beside_frees_and_puts_gives_the_block_or_nothing(tmp_path: Path) -> None:
    assert sum(asyncio.run(race(tmp_path, seed)) for seed in range(20)) > 100


def test_memory_that_is_used_again_before_the_entry_is_gone_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "_hide", lambda self, number: None)
    with pytest.raises(AssertionError):
        asyncio.run(race(tmp_path, 1))


def test_a_block_that_finds_its_slots_taken_is_not_entered() -> None:
    table = SharedBlockTable(memoryview(bytearray(32 * 8)))
    for number in range(1, 30):
        table.enter(number, 64 * number, 64)
    found = [number for number in range(1, 30) if table.find(number)]
    assert len(found) == 8
    assert all(table.find(number) == (64 * number, 64) for number in found)
    table.remove(found[0])
    assert table.find(found[0]) is None
