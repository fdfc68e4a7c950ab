"""The calls of UniRL, which is written for 0.1.5: actors' addresses, a client per worker, dense columns."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.storage.clients.mooncake_client import RegisterBufferType
from transfer_queue.utils.enum_utils import ProductionStatus

import transfer_queue as tq
from tests.integration.stack import Process, Stack
from transfer_queue.compat.server_info import Role, server_info
from transfer_queue.metadata import BatchMeta, FieldMeta, SampleMeta


class Server:
    """Stands where UniRL has an actor's handle."""

    def __init__(self, role: Role, process: Process) -> None:
        self._info = server_info(role, process.name, process.ready["address"])

    def get_zmq_server_info(self) -> Any:
        return self._info


@pytest.fixture
def client(stack: Stack) -> Iterator[tq.AsyncTransferQueueClient]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from transfer_queue import process_zmq_server_info
    controller = process_zmq_server_info(Server(Role.CONTROLLER, stack.controller))
    units = process_zmq_server_info({unit.name: Server(Role.STORAGE, unit) for unit in stack.units})
    made = tq.AsyncTransferQueueClient(client_id="Trainer_0", controller_info=controller)
    made.initialize_storage_manager(
        manager_type="AsyncSimpleStorageManager",
        config={"controller_info": controller, "storage_unit_infos": units},
    )
    yield made
    made.close()
    made.close()


async def test_a_rollout_reaches_the_trainer_in_dense_columns(
    client: tq.AsyncTransferQueueClient, partition: str
) -> None:
    latents = torch.arange(4 * 2 * 3, dtype=torch.bfloat16).view(4, 2, 3)
    data = TensorDict(
        {"latents": latents, "reward": torch.tensor([0.0, 1.0, 2.0, 3.0]), "prompt": NonTensorStack(*"abcd")}, [4]
    )
    put = await client.async_put(data=data, partition_id=partition)
    assert (put.size, put.field_names, put.is_ready) == (4, ["latents", "prompt", "reward"], True)

    fields = ["latents", "reward", "prompt"]
    assert await client.async_check_production_status(data_fields=fields, partition_id=partition)
    assert not await client.async_check_consumption_status(task_name="train", partition_id=partition)
    metas = [
        await client.async_get_meta(
            data_fields=fields, batch_size=2, partition_id=partition, mode="fetch", task_name="train"
        )
        for _ in range(2)
    ]
    assert [meta.global_indexes for meta in metas] == [put.global_indexes[:2], put.global_indexes[2:]]
    assert await client.async_check_consumption_status(task_name="train", partition_id=partition)

    batch = await client.async_get_data(metas[1])
    assert not batch["latents"].is_nested
    assert torch.equal(batch["latents"], latents[2:])
    assert batch["reward"].tolist() == [2.0, 3.0]
    assert list(batch["prompt"]) == ["c", "d"]
    for kind in RegisterBufferType:
        await client.async_reset_zero_copy_all_keys_free(kind)
    assert torch.equal(batch["latents"], latents[2:])  # the call frees nothing that a caller still holds

    await client.async_put(data=TensorDict({"advantage": torch.tensor([[1.0], [2.0]])}, [2]), metadata=metas[1])
    read = await client.async_get_meta(
        data_fields=["advantage"], batch_size=2, partition_id=partition, task_name="update"
    )
    assert read.global_indexes == metas[1].global_indexes
    assert (await client.async_get_data(read))["advantage"].tolist() == [[1.0], [2.0]]

    await client.async_clear_partition(partition_id=partition)
    assert partition not in await client.async_get_partition_list()


def test_rows_of_unequal_length_stay_ragged_and_readable(client: tq.AsyncTransferQueueClient, partition: str) -> None:
    """0.1.5 gives these back in a form that cannot be read."""
    ragged = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)

    async def main() -> TensorDict:
        meta = await client.async_put(data=TensorDict({"x": ragged}, [2]), partition_id=partition)
        return await client.async_get_data(meta)

    assert [len(row) for row in asyncio.run(main())["x"].unbind()] == [1, 3]


def test_the_storage_manager_reads_and_writes_by_itself(client: tq.AsyncTransferQueueClient, partition: str) -> None:
    async def main() -> list[int]:
        meta = await client.async_get_meta(data_fields=[], batch_size=2, partition_id=partition, mode="insert")
        manager = client.storage_manager
        assert manager is not None
        data = TensorDict({"x": torch.tensor([7, 8])}, [2])
        await manager.put_data(data, meta)
        meta.add_fields(data)
        values: list[int] = (await manager.get_data(meta))["x"].tolist()
        await manager.clear_data(meta)
        return values

    assert asyncio.run(main()) == [7, 8]


def test_a_wrong_kind_of_buffer_is_refused_by_name(client: tq.AsyncTransferQueueClient) -> None:
    with pytest.raises(TypeError, match="buffer_type"):
        asyncio.run(client.async_reset_zero_copy_all_keys_free("get_tensor"))  # type: ignore[arg-type]


def test_metadata_of_samples() -> None:
    ready = ProductionStatus.READY_FOR_CONSUME
    samples = [
        SampleMeta("p", index, {"x": FieldMeta("x", torch.float32, (), production_status=ready)}) for index in (4, 9)
    ]
    meta = BatchMeta(samples=samples, extra_info={"step": 3})
    assert (meta.global_indexes, meta.partition_ids, meta.field_names) == ([4, 9], ["p", "p"], ["x"])
    assert meta.is_ready
    assert [sample.batch_index for sample in samples] == [0, 1]
    other = BatchMeta.from_samples([SampleMeta("p", index, {"y": FieldMeta("y", None, None)}) for index in (4, 9)])
    union = meta.union(other)
    assert (union.field_names, union.is_ready, union.extra_info) == (["x", "y"], False, {"step": 3})
