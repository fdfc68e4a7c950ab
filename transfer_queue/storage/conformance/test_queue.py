"""A whole queue on the backend, through the public API."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from transfer_queue.errors import CapacityError, StorageKeyNotFoundError, TransferQueueError
from transfer_queue.storage.conformance.blocks import BlockClient, rows_of
from transfer_queue.storage.conformance.servers import CAPACITY, Servers, wait_until

MIB = 1 << 20


def batch_of(rows: int) -> TensorDict:
    ragged = [torch.arange(row % 4, dtype=torch.float16) for row in range(rows)]
    return TensorDict(
        {
            "dense": torch.randn(rows, 5),
            "flag": torch.arange(rows) % 2 == 0,
            "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "text": NonTensorStack(*[f"row {row} é" for row in range(rows)]),
            "object": NonTensorStack(*[{"row": row, "list": [None, 1.5]} for row in range(rows)]),
        },
        batch_size=[rows],
    )


def keys_of(rows: int) -> list[str]:
    return [f"k{row}" for row in range(rows)]


def assert_same(found: TensorDict, expected: TensorDict, rows: list[int] | None = None) -> None:
    assert set(found.keys()) == set(expected.keys())
    for name in expected.keys():  # noqa: SIM118 (iterating over a TensorDict gives its rows)
        wanted = rows_of(expected.get(name))
        wanted = wanted if rows is None else [wanted[row] for row in rows]
        for one, other in zip(rows_of(found.get(name)), wanted, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), name
            else:
                assert getattr(one, "data", one) == getattr(other, "data", other), name


@pytest.mark.parametrize("rows", [1, 300])
def test_batch_comes_back_equal(queue: Servers, partition: str, rows: int) -> None:
    batch = batch_of(rows)
    tq.kv_batch_put(keys_of(rows), partition, batch)
    assert_same(tq.kv_batch_get(keys_of(rows), partition), batch)


def test_rows_in_any_order_and_some_fields(queue: Servers, partition: str) -> None:
    batch = batch_of(20)
    tq.kv_batch_put(keys_of(20), partition, batch)
    order = [7, 3, 3, 19, 0]
    found = tq.kv_batch_get([f"k{row}" for row in order], partition, select_fields=["ragged", "text"])
    assert_same(found, batch.select("ragged", "text"), order)


def test_fields_of_several_puts_are_read_together(queue: Servers, partition: str) -> None:
    batch = batch_of(12)
    tq.kv_batch_put(keys_of(6), partition, batch[:6].select("dense", "text"))
    tq.kv_batch_put(keys_of(12)[6:], partition, batch[6:].select("dense", "text"))
    tq.kv_batch_put(keys_of(12), partition, batch.select("flag"))
    assert_same(tq.kv_batch_get(keys_of(12), partition), batch.select("dense", "text", "flag"))


@pytest.mark.parametrize("zero_copy", [False, True])
def test_batches_keep_their_values_while_others_are_read(queue: Servers, partition: str, zero_copy: bool) -> None:
    keys = [[f"{number} {key}" for key in keys_of(8)] for number in range(4)]
    for number in range(4):
        batch = TensorDict({"x": torch.full((8, 50_000), float(number))}, batch_size=[8])
        tq.kv_batch_put(keys[number], partition, batch)
    kept = [tq.kv_batch_get(each, partition, zero_copy=zero_copy) for each in keys]
    assert [{float(row.unique()) for row in rows_of(batch["x"])} for batch in kept] == [{0.0}, {1.0}, {2.0}, {3.0}]
    for each in keys:
        tq.kv_clear(each, partition)


def test_overwritten_rows_give_the_new_values(queue: Servers, partition: str) -> None:
    tq.kv_batch_put(keys_of(10), partition, TensorDict({"x": torch.zeros(10, 3)}, batch_size=[10]))
    tq.kv_batch_put(keys_of(10)[2:5], partition, TensorDict({"x": torch.ones(3, 3)}, batch_size=[3]))
    found = torch.stack(rows_of(tq.kv_batch_get(keys_of(10), partition).get("x")))
    assert found[:, 0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_cleared_rows_give_their_space_back(queue: Servers, partition: str) -> None:
    """Twice the capacity passes through in turns."""
    for _ in range(2 * 2 * CAPACITY // (16 * MIB)):
        batch = TensorDict({"x": torch.randint(0, 255, (16, MIB), dtype=torch.uint8)}, batch_size=[16])
        tq.kv_batch_put(keys_of(16), partition, batch)
        assert_same(tq.kv_batch_get(keys_of(16), partition), batch)
        tq.kv_clear(keys_of(16), partition)
        with pytest.raises(ValueError, match="not found"):
            tq.kv_batch_get(keys_of(16), partition)


def test_reported_use_follows_puts_and_clears(queue: Servers, blocks: BlockClient, partition: str) -> None:
    batch = TensorDict({"x": torch.ones(8, MIB)}, batch_size=[8])
    if not blocks.capabilities.reports_capacity:
        assert queue.used() <= 2 * CAPACITY
    wait_until(lambda: not blocks.capabilities.reports_capacity or queue.used() < MIB, "nothing is left of other tests")
    tq.kv_batch_put(keys_of(8), partition, batch)
    wait_until(lambda: not blocks.capabilities.reports_capacity or queue.used() >= 32 * MIB, "the put is accounted")
    tq.kv_clear(keys_of(8), partition)
    wait_until(lambda: not blocks.capabilities.reports_capacity or queue.used() < MIB, "the clear is accounted")


def test_batch_beyond_all_capacity_is_refused_and_leaves_nothing(queue: Servers, partition: str) -> None:
    rows = 3 * 2 * CAPACITY // (16 * MIB)
    batch = TensorDict({"x": torch.zeros(rows, 8 * MIB, dtype=torch.uint8)}, batch_size=[rows])
    with pytest.raises(CapacityError, match="capacity"):
        tq.kv_batch_put(keys_of(rows), partition, batch)
    assert partition not in tq.kv_list()
    tq.kv_batch_put(["after"], partition, batch_of(1))
    assert_same(tq.kv_batch_get(["after"], partition).select("flag"), batch_of(1).select("flag"))


_WRITER = """
import sys, torch, transfer_queue as tq
from tensordict import TensorDict
address, partition = sys.argv[1:]
tq.init({"controller": {"addresses": [address]}})
tq.kv_batch_put(["a", "b"], partition, TensorDict({"x": torch.tensor([[1.5], [2.5]])}, batch_size=[2]))
tq.close()
"""


def test_rows_outlive_the_process_that_put_them(queue: Servers, partition: str) -> None:
    subprocess.run([sys.executable, "-c", _WRITER, queue.address, partition], check=True, timeout=120)
    found = tq.kv_batch_get(["b", "a"], partition)
    assert [row.tolist() for row in rows_of(found.get("x"))] == [[2.5], [1.5]]


def read_or_error(keys: list[str], partition: str) -> Any:
    try:
        return tq.kv_batch_get(keys, partition)
    except TransferQueueError as error:
        return error


def test_restart_of_the_units_keeps_the_rows_or_reports_them_lost(
    queue: Servers, blocks: BlockClient, partition: str
) -> None:
    batch = batch_of(50)
    tq.kv_batch_put(keys_of(50), partition, batch)
    queue.kill_units()
    queue.restart_units()
    if blocks.capabilities.persistent:
        wait_until(
            lambda: not isinstance(read_or_error(keys_of(50), partition), TransferQueueError),
            "the rows are readable again",
        )
        assert_same(tq.kv_batch_get(keys_of(50), partition), batch)
    else:
        wait_until(
            lambda: isinstance(read_or_error(keys_of(50), partition), TransferQueueError), "the loss is reported"
        )
    tq.kv_clear(keys_of(50), partition)
    tq.kv_batch_put(["new"], partition, batch_of(1))
    found = tq.kv_batch_get(["new"], partition)
    assert_same(found.select("flag", "text"), batch_of(1).select("flag", "text"))


def test_unknown_key_is_an_error_that_names_it(queue: Servers, partition: str) -> None:
    tq.kv_batch_put(["known"], partition, batch_of(1))
    with pytest.raises((ValueError, StorageKeyNotFoundError), match="unknown-key"):
        tq.kv_batch_get(["known", "unknown-key"], partition)
