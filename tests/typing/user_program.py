"""A program that uses the public interface with types; never run, checked with ``mypy --strict``."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.dataloader import chunk_batch_fn, mark_end


class ShortestFirst(tq.BaseSampler):
    """A user's sampler."""

    def __init__(self, field: str = "length") -> None:
        super().__init__()
        self.field = field

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        tags: dict[int, dict[str, Any]] = kwargs["partition"].get_custom_meta(ready_indexes)
        rows = sorted(ready_indexes, key=lambda index: float(tags[index][self.field]))[:batch_size]
        return (rows, rows) if len(rows) == batch_size else ([], [])


def double(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value * 2 for name, value in fields.items()}


def produce(partition: str) -> tq.KVBatchMeta:
    one: tq.KVBatchMeta = tq.kv_put("a", partition, {"x": torch.ones(3), "note": "text"}, tag={"step": 1})
    many = tq.kv_batch_put(
        ["b", "c"], partition, TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), [{}, {}], data_parser=double
    )
    keys: list[str] = one.keys + many.keys
    names: list[str] | None = many.fields
    listed: dict[str, dict[str, dict[str, Any]]] = tq.kv_list(partition)
    assert len(keys) == 3
    assert names is not None
    assert partition in listed
    return tq.KVBatchMeta.concat([one, many])


def consume(meta: tq.KVBatchMeta) -> int:
    batch = tq.kv_batch_get_by_meta(meta, "x")
    rest = tq.kv_batch_get(meta.keys, str(meta.partition_id), select_fields=["x"])
    for part in meta.chunk(2):
        tq.kv_clear(part.keys, str(part.partition_id))
    return int(batch.batch_size[0]) + int(rest.batch_size[0])


async def in_a_loop(partition: str) -> list[str]:
    meta = await tq.async_kv_put("a", partition, tag={"state": "new"})
    await tq.async_kv_batch_put(["b"], partition, tags=[{"state": "new"}])
    batch = await tq.async_kv_batch_get_by_meta(meta)
    again = await tq.async_kv_batch_get("a", partition)
    listed = await tq.async_kv_list()
    await tq.async_kv_clear(["a", "b"], partition)
    assert batch.batch_size == again.batch_size
    return list(listed[partition])


def rows(partition: str) -> tuple[tq.BatchMeta, bool]:
    client: tq.TransferQueueClient = tq.get_client()
    meta = client.put(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), partition_id=partition)
    meta.update_custom_meta([{"length": 3}, {"length": 2}])
    client.set_custom_meta(meta)
    fetched = client.get_meta(
        ["x"], 2, partition, mode="fetch", task_name="train", sampling_config={"dp_rank": 0}, timeout=1.0
    )
    data = client.get_data(fetched)
    index, status = client.get_production_status(["x"], partition)
    if index is not None and status is not None:
        assert index.shape[0] == status.shape[0] == data.batch_size[0]
    first: tq.BatchMeta = fetched[0]
    halves: list[tq.BatchMeta] = fetched.chunk(2)
    keyed = client.kv_retrieve_meta(["a"], partition, create=True)
    keys: list[str] = client.kv_retrieve_keys(keyed.global_indexes, partition)
    client.clear_samples(tq.BatchMeta.concat([first, *halves]))
    client.clear_partition(partition)
    done: bool = client.check_consumption_status("train", partition) and client.reset_consumption(partition)
    return keyed.union(None), done and keys == ["a"] and partition in client.get_partition_list()


async def rows_in_a_loop(partition: str) -> None:
    info = tq.ZMQServerInfo("controller", "c", "127.0.0.1", {"request_handle_socket": 50060})
    client = tq.AsyncTransferQueueClient("worker", info)
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": {}})
    meta = await client.async_put(TensorDict({"x": torch.ones(2)}, batch_size=[2]), partition_id=partition)
    data = await client.async_get_data(meta.select_fields(["x"]))
    ready: bool = await client.async_check_production_status(["x"], partition)
    assert ready
    assert len(data) == meta.size
    await client.async_clear_samples(meta)
    client.close()


def stream(partition: str) -> float:
    dataset = tq.StreamingDataset(
        None, 8, 2, ["x"], partition, "train", dp_rank=0, process_batch_fn=chunk_batch_fn, total_samples=64
    )
    loader = tq.StreamingDataLoader(dataset, num_workers=2)
    total = 0.0
    for batch, meta in loader:
        total += float(batch["x"].sum()) / meta.size
    state: dict[str, Any] = loader.state_dict()
    loader.load_state_dict(state)
    mark_end(partition)
    return total


def main() -> None:
    conf = tq.init({"controller": {"sampler": ShortestFirst}})
    endpoint: str | None = tq.get_metrics_endpoint()
    try:
        consume(produce("p"))
        asyncio.run(in_a_loop("p"))
        rows("p")
    except tq.StorageKeyNotFoundError as error:
        print(error, endpoint, conf, tq.__version__)
    except tq.TransferQueueError:
        raise
    finally:
        tq.close()
