"""What is put comes back byte for byte: every way to storage, every kind of column."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until


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
    assert client.get_data(more)["z"].tolist() == [0, 10, 20]
    assert client.reset_consumption(partition, "t")
    assert client.get_meta(["x"], 4, partition, task_name="t").size == 4
    first.custom_meta = [{"row": row} for row in range(3)]
    client.set_custom_meta(first)
    everything = client.get_meta(["x"], 0, partition, mode="force_fetch")
    assert everything.custom_meta == [{"row": 0}, {"row": 1}, {"row": 2}, {}]
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
