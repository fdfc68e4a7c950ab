"""What is put comes back byte for byte: every way to storage, every kind of column."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.client.engine import Engine
from transfer_queue.errors import StorageKeyNotFoundError


@pytest.fixture(scope="module", params=["shared memory", "TCP", "asyncio TCP"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("asyncio"):
            patch.setenv("TQ_EVENT_LOOP", "asyncio")
        with running_stack(
            units=2, capacity="128Mi", settings={"sharedMemory": request.param == "shared memory"}
        ) as it:
            yield it


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("width", [1, 5_000, 500_000], ids=["inline", "in between", "large"])
def test_a_mixed_batch_comes_back_unchanged(queue: Stack, partition: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    ragged = [torch.randint(0, 1000, (length * width // 4 + length,), generator=generator) for length in (3, 0, 7)]
    data = TensorDict(
        {
            "dense": torch.randn(3, width, generator=generator),
            "ragged": jagged(ragged),
            "scalar": torch.tensor([True, False, True]),
            "half": torch.randn(3, 2, generator=generator).to(torch.bfloat16),
            "text": NonTensorStack("one", "", "drei äöü"),
            "objects": NonTensorStack({"a": [1, None]}, 2.5, None),
        },
        batch_size=[3],
    )
    tq.kv_batch_put(["a", "b", "c"], partition, data)
    got = tq.kv_batch_get(["c", "a", "b"], partition)
    order = [2, 0, 1]
    assert torch.equal(got["dense"].values().view(3, width), data["dense"][order])
    for row, source in zip(got["ragged"].unbind(), order, strict=True):
        assert torch.equal(row, ragged[source])
    assert torch.equal(got["scalar"], data["scalar"][order])
    assert torch.equal(got["half"].values().view(3, 2), data["half"][order])
    assert got["half"].dtype == torch.bfloat16
    assert list(got["text"]) == ["drei äöü", "one", ""]
    assert list(got["objects"]) == [None, {"a": [1, None]}, 2.5]


def test_what_comes_back_is_an_independent_copy(queue: Stack, partition: str) -> None:
    tq.kv_put("a", partition, {"x": torch.zeros(100_000)})
    got = tq.kv_batch_get("a", partition)["x"].values()
    got += 1
    assert tq.kv_batch_get("a", partition)["x"].values().sum() == 0


def test_rows_of_many_puts_come_back_as_one_batch(queue: Stack, partition: str) -> None:
    rows = 200
    for row in range(rows):
        tq.kv_put(f"k{row}", partition, {"x": torch.full((row % 5,), row), "s": f"s{row}", "n": torch.tensor(row)})
    keys = [f"k{row}" for row in reversed(range(rows))]
    got = tq.kv_batch_get(keys, partition)
    assert got["n"].tolist() == list(reversed(range(rows)))
    assert list(got["s"]) == [f"s{row}" for row in reversed(range(rows))]
    for row, tensor in zip(reversed(range(rows)), got["x"].unbind(), strict=True):
        assert torch.equal(tensor, torch.full((row % 5,), row))


def test_a_put_larger_than_a_unit_is_split_over_units(queue: Stack, partition: str) -> None:
    data = TensorDict({"x": torch.arange(64 * 700_000, dtype=torch.float32).view(64, -1)}, batch_size=[64])  # 179 MB
    keys = [str(row) for row in range(64)]
    tq.kv_batch_put(keys, partition, data)
    assert torch.equal(tq.kv_batch_get(keys, partition)["x"].values(), data["x"].flatten())
    tq.get_client().clear_partition(partition)


def test_cleared_and_overwritten_blocks_give_their_space_back(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    for name in client.get_partition_list():
        client.clear_partition(name)
    wait_until(lambda: queue.used() == 0, "nothing is stored")
    for _ in range(3):
        tq.kv_put("a", partition, {"x": torch.ones(1_000_000)})
    wait_until(lambda: 4e6 <= queue.used() < 5e6, "one row is stored")
    tq.kv_clear("a", partition)
    wait_until(lambda: queue.used() == 0, "nothing is stored")


def test_the_low_level_client_appends_fetches_and_clears(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    data = TensorDict({"x": torch.arange(12).view(4, 3), "y": torch.arange(4)}, batch_size=[4])
    written = client.put(data, partition_id=partition)
    assert written.is_ready
    assert written.field_names == ["x", "y"]
    assert client.get_production_status(["x", "y"], partition)[1].tolist() == [[1, 1]] * 4
    first = client.get_meta(["x", "y"], 3, partition, task_name="t")
    assert first.global_indexes == written.global_indexes[:3]
    got = client.get_data(first)
    assert got["y"].tolist() == [0, 1, 2]
    assert torch.equal(got["x"].values().view(3, 3), data["x"][:3])
    assert client.get_consumption_status("t", partition)[1].tolist() == [1, 1, 1, 0]
    assert not client.check_consumption_status("t", partition)
    more = client.put(TensorDict({"z": torch.arange(3) * 10}, batch_size=[3]), metadata=first)
    assert more is first
    assert client.get_data(more.select_fields(["y", "z"]))["z"].tolist() == [0, 10, 20]
    assert client.get_data(more)["y"].tolist() == [0, 1, 2]
    more.custom_meta[1]["seen"] = True
    client.put(TensorDict({"z": torch.arange(3)}, batch_size=[3]), metadata=more)
    assert client.get_meta(["x"], 0, partition, mode="force_fetch").custom_meta[:2] == [{}, {"seen": True}]
    assert client.reset_consumption(partition, "t")
    assert client.get_meta(["x"], 4, partition, task_name="t").size == 4
    first.custom_meta = [{"row": row} for row in range(3)]
    client.set_custom_meta(first)
    everything = client.get_meta(["x"], 0, partition, mode="force_fetch")
    assert everything.custom_meta == [{"row": 0}, {"row": 1, "seen": True}, {"row": 2}, {}]
    client.clear_samples(first)
    client.clear_samples(first)
    assert client.get_meta(["x"], 0, partition, mode="force_fetch").global_indexes == written.global_indexes[3:]
    assert partition in client.get_partition_list()
    client.clear_partition(partition)
    assert partition not in client.get_partition_list()
    with pytest.raises(KeyError):
        client.get_data(first)


def test_rows_of_several_partitions_are_read_in_order(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    parts = [
        client.put(
            TensorDict({"x": torch.tensor([10 * n, 10 * n + 1])}, batch_size=[2]), partition_id=f"{partition}{n}"
        )
        for n in range(2)
    ]
    both = tq.BatchMeta.concat(parts)
    both.reorder([3, 0, 2, 1])
    assert client.get_data(both)["x"].tolist() == [11, 0, 10, 1]


def test_a_row_that_is_overwritten_again_and_again_while_it_is_read_is_read_in_the_end(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq.kv_put("hot", partition, {"x": torch.tensor(0)})
    client, backend = tq.get_client(), tq.get_client()._engine._backend.current
    assert backend is not None
    read, one_block, overwritten = backend.get, queue.used(), 0

    async def overwritten_before_it_is_read(reads: Any, *, timeout_s: float) -> Any:
        nonlocal overwritten
        if overwritten < 7:
            overwritten += 1
            await client.kv.put_one("hot", partition, {"x": torch.tensor(overwritten)}, None, None).work
            wait_until(lambda: queue.used() == one_block, "the block that was read before is freed")
        return await read(reads, timeout_s=timeout_s)

    monkeypatch.setattr(backend, "get", overwritten_before_it_is_read)
    assert tq.kv_batch_get("hot", partition)["x"].tolist() == [7]


def located(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta:
    """Four rows of one block, fetched."""
    client.put(TensorDict({"x": torch.arange(4), "y": torch.arange(4) * 10}, batch_size=[4]), partition_id=partition)
    return client.get_meta(["x", "y"], 4, partition, task_name="t")


def test_fetched_metadata_reads_its_rows_however_it_is_selected(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    meta = located(client, partition)
    assert client.get_data(meta)["x"].tolist() == [0, 1, 2, 3]
    assert [client.get_data(part)["y"].tolist() for part in meta.chunk(2)] == [[0, 10], [20, 30]]
    assert client.get_data(meta.select_samples([3, 1, 1]))["x"].tolist() == [3, 1, 1]
    assert list(client.get_data(meta.select_fields(["y"])).keys()) == ["y"]
    meta.reorder([2, 0, 3, 1])
    assert client.get_data(meta)["x"].tolist() == [2, 0, 3, 1]
    meta.global_indexes.reverse()
    assert client.get_data(meta)["x"].tolist() == [1, 3, 0, 2]
    assert client.get_data(pickle.loads(pickle.dumps(meta)))["x"].tolist() == [1, 3, 0, 2]


def test_fetched_metadata_gives_what_was_written_since(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    meta = located(client, partition)
    # One row of a block that lives on, a field of all rows, and at last every cell of the block.
    client.put(TensorDict({"x": torch.tensor([7])}, batch_size=[1]), metadata=meta[2])
    assert client.get_data(meta)["x"].tolist() == [0, 1, 7, 3]
    client.put(TensorDict({"y": torch.arange(4) + 5}, batch_size=[4]), metadata=meta)
    assert client.get_data(meta)["y"].tolist() == [5, 6, 7, 8]
    client.put(TensorDict({"x": -torch.arange(4)}, batch_size=[4]), metadata=meta)
    got = client.get_data(meta)
    assert got["x"].tolist() == [0, -1, -2, -3]
    assert got["y"].tolist() == [5, 6, 7, 8]
    meta = meta.add_fields(TensorDict({"z": torch.zeros(4)}, batch_size=[4]))
    client.put(TensorDict({"z": torch.ones(4)}, batch_size=[4]), metadata=meta)
    assert client.get_data(meta)["z"].tolist() == [1.0] * 4


@pytest.mark.parametrize("cleared", [[1], [0, 1, 2, 3]], ids=["one row of its block", "the whole block"])
def test_fetched_metadata_of_a_cleared_row_is_a_missing_key(queue: Stack, partition: str, cleared: list[int]) -> None:
    client = tq.get_client()
    meta = located(client, partition)
    client.clear_samples(meta.select_samples(cleared))
    with pytest.raises(StorageKeyNotFoundError):
        client.get_data(meta)
    kept = [row for row in range(4) if row not in cleared]
    if kept:
        assert client.get_data(meta.select_samples(kept))["x"].tolist() == kept


def test_fetched_metadata_is_read_while_it_is_looked_up(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tq.get_client()
    meta = located(client, partition)
    load, lookup, steps = Engine.load, Engine.lookup, []

    async def noted_load(engine: Engine, *arguments: Any) -> Any:
        steps.append("read")
        return await load(engine, *arguments)

    async def noted_lookup(engine: Engine, *arguments: Any) -> Any:
        found = await lookup(engine, *arguments)
        steps.append("found")
        return found

    monkeypatch.setattr(Engine, "load", noted_load)
    monkeypatch.setattr(Engine, "lookup", noted_lookup)

    def steps_of(metadata: tq.BatchMeta) -> list[str]:
        steps.clear()
        client.get_data(metadata)
        return list(steps)

    assert steps_of(meta) == ["read", "found"]
    assert steps_of(meta[1:3]) == ["read", "found"]
    assert steps_of(meta.select_fields(["y"])) == ["read", "found"]
    assert steps_of(pickle.loads(pickle.dumps(meta))) == ["found", "read"]
    client.put(TensorDict({"x": torch.tensor([7])}, batch_size=[1]), metadata=meta[2])
    assert steps_of(meta) == ["read", "found", "read"]
    meta.global_indexes.reverse()
    assert steps_of(meta) == ["found", "read"]
