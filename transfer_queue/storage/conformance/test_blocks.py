"""The client side of a backend: ``storage.base.Backend``."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from transfer_queue.columns.tensors import encode
from transfer_queue.errors import CapacityError, ConnectionLostError, StorageKeyNotFoundError, TransferQueueError
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.conformance.blocks import (
    BlockClient,
    block_bytes,
    block_of_bytes,
    decoded,
    mixed_block,
)
from transfer_queue.storage.conformance.servers import CAPACITY, wait_until

MIB = 1 << 20


def same_rows(found: list[object], expected: list[object]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


def is_gone(blocks: BlockClient, number: int) -> bool:
    try:
        blocks.read(number, blocks.units[0])
    except StorageKeyNotFoundError:
        return True
    return False


@pytest.mark.parametrize("nbytes", [64, 64 << 10, 5 * MIB, 24 * MIB], ids=["64B", "64KiB", "5MiB", "24MiB"])
def test_block_comes_back_bit_for_bit(blocks: BlockClient, nbytes: int) -> None:
    block = block_of_bytes(nbytes)
    number = blocks.put(block, blocks.units[0])
    for size in (block.nbytes, None):  # known to the reader or not
        fetched = blocks.get([BlockRead(blocks.units[0], number, nbytes=size)])
        assert block_bytes(fetched.blocks[0].view) == bytes(block.to_bytes())
        fetched.release()


def test_fields_of_every_kind_come_back_equal(blocks: BlockClient) -> None:
    values, block = mixed_block(13)
    number = blocks.put(block, blocks.units[0])
    fetched = blocks.get([BlockRead(blocks.units[0], number)])
    found = decoded(fetched.blocks[0], list(values))
    fetched.release()
    for name, rows in values.items():
        assert same_rows(found[name], rows), name


@pytest.mark.parametrize("rows", [(2, 9), np.array([12, 0, 5, 5])], ids=["range", "picked-and-repeated"])
def test_some_fields_of_some_rows(blocks: BlockClient, rows: tuple[int, int] | NDArray[np.int64]) -> None:
    values, block = mixed_block(13)
    number = blocks.put(block, blocks.units[0])
    names = ["ragged", "text", "dense"]
    fetched = blocks.get([BlockRead(blocks.units[0], number, names, rows, block.nbytes)])
    found = decoded(fetched.blocks[0], names)
    fetched.release()
    picked = range(*rows) if isinstance(rows, tuple) else rows.tolist()
    for name in names:
        assert same_rows(found[name], [values[name][row] for row in picked]), name


def test_block_without_rows(blocks: BlockClient) -> None:
    block = encode({"x": torch.zeros(0, 4)})
    number = blocks.put(block, blocks.units[0])
    assert blocks.read(number, blocks.units[0]) == bytes(block.to_bytes())


def test_blocks_of_all_units_come_in_the_order_of_the_reads(blocks: BlockClient) -> None:
    stored = [block_of_bytes(256 + 64 * count) for count in range(20)]
    places = [(blocks.put(block, blocks.units[count % 2]), count % 2) for count, block in enumerate(stored)]
    order = [*reversed(range(20)), 3, 3]
    fetched = blocks.get([BlockRead(blocks.units[places[count][1]], places[count][0]) for count in order])
    assert [block_bytes(found.view) for found in fetched.blocks] == [bytes(stored[count].to_bytes()) for count in order]
    fetched.release()


def test_views_stay_valid_until_they_are_released(blocks: BlockClient) -> None:
    block = block_of_bytes(2 * MIB)
    number = blocks.put(block, blocks.units[0])
    fetched = blocks.get([BlockRead(blocks.units[0], number)])
    blocks.discard(number, blocks.units[0])
    for _ in range(8):  # what would take the place of the block
        blocks.put(block_of_bytes(2 * MIB), blocks.units[0])
    assert block_bytes(fetched.blocks[0].view) == bytes(block.to_bytes())
    fetched.release()
    fetched.release()


def test_missing_block_is_an_error_that_names_it(blocks: BlockClient) -> None:
    number = blocks.unknown_block(blocks.units[0])
    present = blocks.put(block_of_bytes(4096), blocks.units[0])
    with pytest.raises(StorageKeyNotFoundError) as raised:
        blocks.get([BlockRead(blocks.units[0], present), BlockRead(blocks.units[0], number)])
    assert str(number) in str(raised.value) or f"{number:#x}" in str(raised.value)


def test_discarded_block_is_gone_and_discarding_is_idempotent(blocks: BlockClient) -> None:
    number = blocks.put(block_of_bytes(MIB), blocks.units[0])
    blocks.discard(number, blocks.units[0])
    wait_until(lambda: is_gone(blocks, number), "the block is gone")
    blocks.discard(number, blocks.units[0])
    blocks.discard(blocks.unknown_block(blocks.units[0]), blocks.units[0])
    assert is_gone(blocks, number)


def test_number_stored_twice_gives_one_of_the_two_blocks(blocks: BlockClient) -> None:
    first, second = block_of_bytes(MIB), block_of_bytes(MIB)
    number = blocks.put(first, blocks.units[0])
    try:
        blocks.put_as(number, second, blocks.units[0])
    except TransferQueueError:
        assert not blocks.capabilities.upsert
    expected = second if blocks.capabilities.upsert else first
    assert blocks.read(number, blocks.units[0]) == bytes(expected.to_bytes())


def test_block_larger_than_its_unit_is_refused(blocks: BlockClient) -> None:
    with pytest.raises(CapacityError, match="capacity"):
        blocks.put(block_of_bytes(CAPACITY + MIB), blocks.units[0])
    assert blocks.read(blocks.put(block_of_bytes(64), blocks.units[0]), blocks.units[0])


def test_full_unit_refuses_and_keeps_what_it_has(blocks: BlockClient) -> None:
    stored = blocks.fill(blocks.units[0], 8 * MIB)
    assert len(stored) >= 4  # most of the capacity is usable
    for number, block in stored.items():
        assert blocks.read(number, blocks.units[0]) == bytes(block.to_bytes())


def test_put_waits_for_space_and_gets_it(blocks: BlockClient) -> None:
    numbers = list(blocks.fill(blocks.units[0], 8 * MIB))
    block = block_of_bytes(8 * MIB)
    outcome: list[int] = []
    waiting = threading.Thread(target=lambda: outcome.append(blocks.put(block, blocks.units[0], wait_s=60)))
    waiting.start()
    blocks.discard(numbers[0], blocks.units[0])
    blocks.discard(numbers[1], blocks.units[0])
    waiting.join(90)
    assert blocks.read(outcome[0], blocks.units[0]) == bytes(block.to_bytes())


def test_many_threads_store_and_read_at_once(blocks: BlockClient) -> None:
    def work(count: int) -> bool:
        block = block_of_bytes(1024 << count % 8)
        number = blocks.put(block, blocks.units[count % 2])
        found = blocks.read(number, blocks.units[count % 2])
        blocks.discard(number, blocks.units[count % 2])
        return found == bytes(block.to_bytes())

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(work, range(200)))


def test_closed_backend_refuses_and_closes_twice(blocks: BlockClient) -> None:
    number = blocks.put(block_of_bytes(4096), blocks.units[0])
    blocks.close_backend()
    blocks.close_backend()
    with pytest.raises(ConnectionLostError, match="closed"):
        blocks.put(block_of_bytes(4096), blocks.units[0])
    with pytest.raises(ConnectionLostError, match="closed"):
        blocks.get([BlockRead(blocks.units[0], number)])
