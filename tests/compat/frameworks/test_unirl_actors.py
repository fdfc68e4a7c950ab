"""How UniRL builds its queue: a controller and units of its own, brought together by the first client.

The hosts are what the actors hold. They run in this process here, so that what is tested is the queue and not Ray.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.zmq_utils import ZMQServerInfo, process_zmq_server_info

import transfer_queue as tq
from transfer_queue.compat import actor_class
from transfer_queue.compat import actors as compat_actors
from transfer_queue.compat.actors import ControllerHost, StorageUnitHost
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.storage.mooncake.testing import servers as mooncake_servers

HOST = "127.0.0.1"


@pytest.fixture
def servers() -> Iterator[tuple[ControllerHost, dict[int, StorageUnitHost]]]:
    controller = ControllerHost(sampler=GRPOGroupNSampler(n_samples_per_prompt=2), polling_mode=True, host=HOST)
    units = {
        rank: StorageUnitHost(storage_unit_size=1024, config={"unit_capacity": "16Mi"}, host=HOST) for rank in range(2)
    }
    yield controller, units
    for unit in units.values():
        unit.shutdown()
        unit.shutdown()
    controller.shutdown()


def test_the_first_client_brings_controller_and_units_together_and_others_join(
    servers: tuple[ControllerHost, dict[int, StorageUnitHost]],
) -> None:
    controller, units = servers
    info = process_zmq_server_info(controller)
    config = {"controller_info": info, "storage_unit_infos": process_zmq_server_info(units)}
    clients = [tq.AsyncTransferQueueClient(f"worker{number}", info) for number in range(2)]
    for client in clients:
        client.initialize_storage_manager("AsyncSimpleStorageManager", config)
    writer, reader = clients

    async def step() -> list[list[float]]:
        data = TensorDict({"latents": torch.arange(12.0).view(4, 3)}, [4])
        await writer.async_put(data, partition_id="step_0")
        assert (await reader.async_get_meta(["latents"], 6, "step_0", task_name="train")).size == 0
        meta = await reader.async_get_meta(["latents"], 2, "step_0", task_name="train")
        values: list[list[float]] = (await reader.async_get_data(meta))["latents"].tolist()
        return values

    assert asyncio.run(step()) == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert controller.list_partitions() == ["step_0"]
    index, consumed = controller.get_consumption_status("step_0", "train")
    assert index is not None
    assert consumed is not None
    assert consumed.tolist() == [1, 1, 0, 0]
    controller.store_config({"a": 1})
    assert controller.get_config() == {"a": 1}
    assert controller.get_metadata(["latents"], "step_0", "force_fetch").size == 4
    controller.clear_partition("step_0")
    assert controller.list_partitions() == []

    other = ControllerHost(host=HOST)
    stranger = tq.TransferQueueClient("stranger", other.get_zmq_server_info())
    with pytest.raises(StartError, match="is a unit of"):
        stranger.initialize_storage_manager("AsyncSimpleStorageManager", config)
    stranger.close()
    other.shutdown()
    for client in clients:
        client.close()


def test_a_unit_that_is_gone_is_named(servers: tuple[ControllerHost, dict[int, StorageUnitHost]]) -> None:
    controller, units = servers
    infos = process_zmq_server_info(units)
    units[1].shutdown()
    client = tq.TransferQueueClient("worker", controller.get_zmq_server_info())
    with pytest.raises(ConnectionLostError, match=infos[1].id):
        client.initialize_storage_manager("AsyncSimpleStorageManager", {"storage_unit_infos": infos})
    client.close()


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="BaseSampler"):
        ControllerHost(sampler=int)  # type: ignore[arg-type]
    for size in (0, "many"):
        with pytest.raises(ValueError, match="storage_unit_size"):
            StorageUnitHost(storage_unit_size=size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\.remote\(\)"):
        TransferQueueController()


def test_options_of_an_actor_class_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Options:
        def remote(self, **kwargs: int) -> str:
            made.append(kwargs)
            return "handle"

    monkeypatch.setattr(SimpleStorageUnit, "options", lambda **options: Options())
    assert SimpleStorageUnit.remote(storage_unit_size=4) == "handle"
    assert made == [{"storage_unit_size": 4}]


def test_the_names_at_the_top_level_are_the_same_objects() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert tq.TransferQueueController is TransferQueueController  # type: ignore[attr-defined]
        assert tq.SimpleStorageUnit is SimpleStorageUnit  # type: ignore[attr-defined]
        assert compat_actors.SimpleStorageUnit is SimpleStorageUnit is actor_class.SimpleStorageUnit
        assert compat_actors.TransferQueueController is TransferQueueController is actor_class.TransferQueueController
        assert tq.ZMQServerInfo is ZMQServerInfo


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with mooncake_servers(tmp_path) as settings:
        yield settings


@pytest.fixture
def controller() -> Iterator[ControllerHost]:
    host = ControllerHost(polling_mode=True, host=HOST)
    yield host
    host.shutdown()


def test_clients_with_a_mooncake_manager_and_no_units_keep_rows_in_the_store_of_its_master(
    store: dict[str, Any], controller: ControllerHost
) -> None:
    config = {
        "controller_info": controller.get_zmq_server_info(),
        "client_name": "MooncakeStorageClient",
        "metadata_server": store["metadataServer"],
        "master_server_address": store["masterServerAddress"],
        "global_segment_size": 64 << 20,
        "local_buffer_size": 16 << 20,
        "protocol": "tcp",
        "device_name": "",
    }
    with ExitStack() as closing:
        clients = [tq.AsyncTransferQueueClient(f"w{n}", controller.get_zmq_server_info()) for n in range(2)]
        for client in clients:
            closing.callback(client.close)
            client.initialize_storage_manager("MooncakeStorageManager", config)
        assert clients[1].engine.backend_kind == "mooncake"

        async def step() -> list[float]:
            await clients[0].async_put(TensorDict({"x": torch.arange(4.0)}, [4]), partition_id="p")
            meta = await clients[1].async_get_meta(["x"], 4, "p", task_name="train")
            values: list[float] = (await clients[1].async_get_data(meta))["x"].tolist()
            return values

        assert asyncio.run(step()) == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(StartError, match="keeps its rows in the store"):
            clients[0].initialize_storage_manager("MooncakeStorageManager", {**config, "global_segment_size": 1 << 20})
