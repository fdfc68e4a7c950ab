from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.integration.mooncake.clients import client
from tests.integration.mooncake.conftest import CAPACITY, MIB, Unit, block_of_bytes, eventually, settings_of
from tests.waiting import wait_until
from transfer_queue.columns.block import BlockView
from transfer_queue.columns.tensors import Piece, decode, encode
from transfer_queue.errors import CapacityError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.mooncake.master import MasterEndpoints

SMALL_BUFFERS = {"zeroCopy": {"tensorBufferSize": "8Mi", "bytesBufferSize": "8Mi"}}
THROUGH_LOCAL_BUFFER = {"zeroCopy": {"enable": False}, "localBufferSize": "64Mi"}


def raw_bytes(view: BlockView) -> bytes:
    return bytes(view.select(None, None).to_bytes())


async def put_and_get_back(backend: Any, unit: Unit, block: Any, block_id: int) -> None:
    nbytes = await backend.put(block, block_id, unit.info, wait_s=5)
    assert nbytes == block.nbytes
    for size in (nbytes, None):  # known or not
        fetched = await backend.get([BlockRead(unit.info, block_id, nbytes=size)], timeout_s=30)
        assert raw_bytes(fetched.blocks[0].view) == bytes(block.to_bytes())
        fetched.release()


@pytest.mark.parametrize("changes", [{}, THROUGH_LOCAL_BUFFER], ids=["zero-copy", "local-buffer"])
async def test_batch_of_all_kinds_comes_back_equal(
    master: MasterEndpoints, units: list[Unit], run: str, changes: dict[str, Any]
) -> None:
    ragged = [torch.arange(n, dtype=torch.int32) for n in (3, 0, 5)]
    batch = {
        "dense": torch.randn(3, 4, dtype=torch.bfloat16),
        "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
        "text": ["one", "", "dreißig"],
        "objects": [{"a": 1}, None, [1.5, "x"]],
    }
    block = encode(batch)
    async with client(settings_of(master, **changes), run) as backend:
        await backend.put(block, 7, units[0].info, wait_s=5)
        fetched = await backend.get([BlockRead(units[0].info, 7)], timeout_s=30)
        view = fetched.blocks[0].view
        pieces = {field.name: [Piece(view, None, (0, 3))] for field in view.fields}
        result = decode(pieces, 3, view.fields, layout="dense")
        fetched.release()
    assert torch.equal(result["dense"], batch["dense"])
    assert all(torch.equal(a, b) for a, b in zip(result["ragged"].unbind(), ragged, strict=True))
    assert list(result["text"]) == batch["text"]
    assert list(result["objects"]) == batch["objects"]


async def test_many_blocks_on_two_units_come_back_in_the_order_of_the_reads(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    blocks = {number: block_of_bytes(64 * (1 + number), number) for number in range(100)}
    async with client(settings_of(master), run) as backend:
        await asyncio.gather(*(backend.put(block, n, units[n % 2].info, wait_s=5) for n, block in blocks.items()))
        order = [*reversed(blocks), 5, 5]
        reads = [BlockRead(units[n % 2].info, n, nbytes=blocks[n].nbytes, rows=(0, n % 64)) for n in order]
        fetched = await backend.get(reads, timeout_s=30)
        for number, (view, rows) in zip(order, fetched.blocks, strict=True):
            assert raw_bytes(view) == bytes(blocks[number].to_bytes())
            assert rows == (0, number % 64)
        fetched.release()
        assert await asyncio.gather(backend.get([], timeout_s=1)) is not None
    for unit in units:
        unit.ask("registered", unit.info.unit, run)
        assert sorted(unit.ask("inventory")) == list(range(unit.info.unit, 100, 2))
        unit.ask("free", list(range(unit.info.unit, 100, 2)))
        assert unit.ask("inventory") == []


@pytest.mark.parametrize("changes", [SMALL_BUFFERS, THROUGH_LOCAL_BUFFER], ids=["small-buffers", "local-buffer"])
async def test_block_of_four_times_the_buffers_goes_through_in_parts_and_is_freed_whole(
    master: MasterEndpoints, units: list[Unit], run: str, changes: dict[str, Any]
) -> None:
    async with client(settings_of(master, **changes), run) as backend:
        await put_and_get_back(backend, units[1], block_of_bytes(64 * MIB), 1)
        if changes is SMALL_BUFFERS:
            assert backend.pool.registered <= 16 * MIB
        units[1].ask("registered", 1, run)
        assert units[1].ask("inventory") == [1]
        units[1].ask("free", [1])
        assert units[1].ask("inventory") == []
        with pytest.raises(StorageKeyNotFoundError, match=f"tq/{run}/1"):
            await backend.get([BlockRead(units[1].info, 1)], timeout_s=30)


async def test_long_columns_are_sent_from_their_own_memory(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    block = block_of_bytes(96 * MIB)
    async with client(settings_of(master), run) as backend:
        await backend.put(block, 1, units[0].info, wait_s=5)
        assert backend.pool.registered <= 64 * MIB  # not a copy of the block
        fetched = await backend.get([BlockRead(units[0].info, 1, nbytes=block.nbytes)], timeout_s=30)
        assert raw_bytes(fetched.blocks[0].view) == bytes(block.to_bytes())
        fetched.release()
        await backend.discard(1, units[0].info)


async def test_memory_that_a_put_has_twice_or_that_is_a_buffer_of_a_get_is_sent(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    """The engine refuses to register memory that overlaps with what is registered."""
    rows = torch.randint(0, 256, (64, MIB // 8), dtype=torch.uint8)
    overlapping = encode({"head": rows[:40], "same": rows[:40], "tail": rows[24:], "text": ["word"] * 40})
    async with client(settings_of(master), run) as backend:
        await put_and_get_back(backend, units[0], overlapping, 1)
        fetched = await backend.get([BlockRead(units[0].info, 1)], timeout_s=30)
        await put_and_get_back(backend, units[1], fetched.blocks[0].view.select(None, None), 2)
        fetched.release()
        other = encode({"head": rows[:40]})
        await asyncio.gather(*(put_and_get_back(backend, units[0], each, 3 + n) for n, each in enumerate([other] * 3)))
        for number in range(1, 6):
            await backend.discard(number, units[number == 2].info)


async def test_missing_blocks_are_listed(master: MasterEndpoints, units: list[Unit], run: str) -> None:
    async with client(settings_of(master), run) as backend:
        await backend.put(block_of_bytes(640), 1, units[0].info, wait_s=5)
        for nbytes in (None, 1024):
            reads = [BlockRead(units[0].info, block, nbytes=nbytes if block > 1 else None) for block in (1, 2, 3)]
            with pytest.raises(StorageKeyNotFoundError, match=f"tq/{run}/2, tq/{run}/3"):
                await backend.get(reads, timeout_s=30)


async def test_full_unit_refuses_after_the_wait_and_keeps_what_it_has(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    unit, other = units
    block = block_of_bytes(60 * MIB)
    async with client(settings_of(master), run) as backend:
        stored = []
        with suppress(CapacityError):
            for number in range(8):
                await backend.put(block, number, unit.info, wait_s=0)
                stored.append(number)
        assert len(stored) >= 3
        with pytest.raises(CapacityError, match=r"unit-0 has no capacity left.*clear consumed rows"):
            await backend.put(block, 99, unit.info, wait_s=0.3)
        # The engine put the last one elsewhere; it may not stay there, and nothing may have been evicted for it.
        for each, expected in ((unit, stored), (other, [])):
            each.ask("registered", each.info.unit, run)
            assert sorted(each.ask("inventory")) == expected
        for number in stored:
            (await backend.get([BlockRead(unit.info, number, nbytes=block.nbytes)], timeout_s=30)).release()

        # A waiting put goes on as soon as there is room, even if the block that goes was just read.
        waiting = asyncio.create_task(backend.put(block, 100, unit.info, wait_s=20))
        await asyncio.to_thread(unit.ask, "free", stored[:1])
        await waiting
        with pytest.raises(CapacityError, match="exceeds the capacity of storage unit unit-0"):
            await backend.put(block_of_bytes(CAPACITY), 101, unit.info, wait_s=30)
        unit.ask("free", [*stored, 100])

    # The figures are sampled.
    async def emptied() -> None:
        assert unit.ask("stats")[1] < block.nbytes

    await eventually(emptied, AssertionError)


async def test_an_empty_unit_says_that_nothing_is_used(
    master: MasterEndpoints, start_unit: Callable[..., Unit], run: str
) -> None:
    unit = start_unit(settings_of(master), 5)
    unit.ask("registered", 5, run)
    block = block_of_bytes(MIB)

    def used() -> int:
        return int(unit.ask("stats")[1])

    async with client(settings_of(master), run) as backend:
        await backend.put(block, 1, unit.info, wait_s=5)
        await asyncio.to_thread(wait_until, lambda: used() >= block.nbytes, "the block is counted")
        unit.ask("free", [1])
        await asyncio.to_thread(wait_until, lambda: used() == 0, "nothing is counted")


async def test_discarded_block_is_gone_and_freeing_is_idempotent(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    async with client(settings_of(master), run) as backend:
        await backend.put(block_of_bytes(6400), 1, units[0].info, wait_s=5)
        await backend.discard(1, units[0].info)
        await backend.discard(2, units[0].info)
        with pytest.raises(StorageKeyNotFoundError):
            await backend.get([BlockRead(units[0].info, 1)], timeout_s=30)
    units[0].ask("registered", 0, run)
    units[0].ask("free", [1, 2])
    assert units[0].ask("inventory") == []


async def test_views_hold_their_buffer_until_they_are_released(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    block, other = block_of_bytes(7 * MIB, 1), block_of_bytes(7 * MIB, 2)
    async with client(settings_of(master, **SMALL_BUFFERS), run) as backend:
        for number, each in enumerate((block, other)):
            await backend.put(each, number, units[0].info, wait_s=5)
        reads = [[BlockRead(units[0].info, number, nbytes=block.nbytes)] for number in (0, 1)]
        held = [await backend.get(reads[0], timeout_s=30), await backend.get(reads[0], timeout_s=30)]
        with pytest.raises(WaitTimeoutError, match=r"views that are not released.*zeroCopy\.tensorBufferSize"):
            await backend.get(reads[1], timeout_s=0.2)
        waiting = asyncio.create_task(backend.get(reads[1], timeout_s=20))
        await asyncio.sleep(0)
        assert raw_bytes(held[0].blocks[0].view) == bytes(block.to_bytes())
        held[0].release()
        held[0].release()
        fetched = await waiting
        assert raw_bytes(fetched.blocks[0].view) == bytes(other.to_bytes())
        assert raw_bytes(held[1].blocks[0].view) == bytes(block.to_bytes())
        fetched.release()
        held[1].release()
    units[0].ask("registered", 0, run)
    units[0].ask("free", [0, 1])


async def test_new_life_of_the_queue_removes_the_blocks_of_the_old_one(
    master: MasterEndpoints, units: list[Unit], run: str
) -> None:
    async with client(settings_of(master), run) as backend:
        await backend.put(block_of_bytes(6400), 1, units[0].info, wait_s=5)
        units[0].ask("registered", 0, run)
        units[0].ask("registered", 0, f"{run}-next")

        async def gone() -> None:
            with suppress(StorageKeyNotFoundError):
                (await backend.get([BlockRead(units[0].info, 1)], timeout_s=30)).release()
                raise AssertionError("still there")

        await eventually(gone, AssertionError)


async def test_proxies_of_the_environment_are_not_used(
    master: MasterEndpoints, units: list[Unit], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with client(settings_of(master), run) as backend:
        await put_and_get_back(backend, units[0], block_of_bytes(6400), 1)


async def test_peer_to_peer_handshake_needs_no_metadata_server(master: MasterEndpoints, run: str) -> None:
    settings = settings_of(master, metadataServer="P2PHANDSHAKE")
    unit = Unit(settings, 7, 64 * MIB)
    try:
        async with client(settings, run) as backend:
            await put_and_get_back(backend, unit, block_of_bytes(6 * MIB), 1)
        unit.ask("registered", 7, run)
        assert unit.ask("inventory") == [1]
    finally:
        unit.end()
