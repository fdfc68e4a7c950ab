"""The registries and helpers of 0.1.x that programs import."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.clients.mooncake_client import MooncakeStoreClient
from transfer_queue.storage.managers.base import StorageManager
from transfer_queue.utils.common import get_env_bool, limit_pytorch_auto_parallel_threads
from transfer_queue.utils.enum_utils import ProductionStatus
from transfer_queue.utils.enum_utils import Role as SameRole
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.utils.zmq_utils import (
    format_zmq_address,
    get_free_port,
    get_node_ip_address,
    is_ipv6_address,
    process_zmq_server_info,
)

import transfer_queue as tq
from tests.integration.stack import Stack
from transfer_queue.compat.managers import MANAGER_TYPES
from transfer_queue.compat.server_info import Role, server_info
from transfer_queue.storage import StorageManagerFactory, StorageUnitData


class DictClient(StorageKVClient):
    """A key-value store in a dictionary, as a user of the registry writes one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.values: dict[str, Any] = {}

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        self.values.update(zip(keys, values, strict=True))
        return [{"size": value.numel()} for value in values]

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        return [self.values[key] for key in keys]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        for key in keys:
            del self.values[key]


def test_a_registered_manager_is_created_by_its_name() -> None:
    @StorageManagerFactory.register("Mine")
    class Mine(StorageManager):
        async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None: ...
        async def get_data(self, metadata: Any) -> Any: ...
        async def clear_data(self, metadata: Any) -> None: ...

    info = server_info(Role.CONTROLLER, "c", "h:1")
    made = StorageManagerFactory.create("Mine", info, {"a": 1})
    assert isinstance(made, Mine)
    assert (made.controller_info, made.config) == (info, {"a": 1})
    with pytest.raises(TypeError, match="subclass"):
        StorageManagerFactory.register("Other")(int)
    with pytest.raises(ValueError, match="manager_type"):
        StorageManagerFactory.create("Nothing", info, {})


async def test_a_manager_over_a_key_value_client_keeps_values_under_index_and_field() -> None:
    StorageClientFactory.register("DictClient")(DictClient)
    manager: Any = StorageManagerFactory.create(
        "KVStorageManager", server_info(Role.CONTROLLER, "c", "h:1"), {"client_name": "DictClient"}
    )
    data = TensorDict({"x": torch.tensor([[1, 2], [3, 4]])}, [2])
    meta = tq.BatchMeta([7, 9], ["p", "p"]).add_fields(data)
    assert await manager.put_data(data, meta) == [{"size": 2}, {"size": 2}]
    assert sorted(manager.storage_client.values) == ["7@x", "9@x"]
    assert (await manager.get_data(meta))["x"].tolist() == [[1, 2], [3, 4]]
    await manager.clear_data(meta)
    assert manager.storage_client.values == {}
    with pytest.raises(NotImplementedError, match="data_parser"):
        await manager.put_data(data, meta, data_parser=dict)


def test_wrong_registrations_are_refused_by_name() -> None:
    info = server_info(Role.CONTROLLER, "c", "h:1")
    with pytest.raises(ValueError, match="client_name"):
        StorageManagerFactory.create("KVStorageManager", info, {})
    with pytest.raises(ValueError, match="Unknown StorageClient"):
        StorageClientFactory.create("Nothing", {})
    with pytest.raises(TypeError, match="subclass"):
        StorageClientFactory.register("Bad")(dict)
    with pytest.raises(ValueError, match=r"MooncakeStoreClient.*transfer_queue\.init"):
        MooncakeStoreClient({})


def test_a_bootstrap_is_found_in_any_case() -> None:
    @StorageBootstrapProvider.register_provider("MyStore")
    def start(conf: Any) -> list[Any]:
        return [conf]

    assert StorageBootstrapProvider.get_provider("mystore") is start
    assert StorageBootstrapProvider.get_provider("nothing") is None


@pytest.mark.parametrize("name", MANAGER_TYPES["SimpleStorage"])
async def test_a_built_in_manager_reads_and_writes_rows_of_the_queue(queue: Stack, partition: str, name: str) -> None:
    client = tq.get_client()
    meta = client.get_meta([], 2, partition, mode="insert")
    info = server_info(Role.CONTROLLER, "controller", queue.address)
    manager = StorageManagerFactory.create(name, info, {"zmq_info": {}})
    data = TensorDict({"x": torch.tensor([5, 6])}, [2])
    await manager.put_data(data, meta)
    meta.add_fields(data)
    assert (await manager.get_data(meta))["x"].tolist() == [5, 6]
    await manager.clear_data(meta)
    indexes, _ = client.get_production_status(["x"], partition)
    assert indexes is not None
    assert indexes.tolist() == []
    manager.close()
    with pytest.raises(RuntimeError, match="cannot be declared ready"):
        await manager.notify_data_update(partition, [0], {})


@pytest.mark.parametrize("kind", [*(name for names in MANAGER_TYPES.values() for name in names), "KVStorageManager"])
def test_every_built_in_manager_may_be_named_and_old_names_are_dense(queue: Stack, partition: str, kind: str) -> None:
    client = tq.TransferQueueClient("one", queue.address)
    client.initialize_storage_manager(kind, {"zmq_info": {}, "client_name": "MooncakeStorageClient"})
    meta = client.put(TensorDict({"x": torch.ones(2, 3)}, [2]), partition_id=partition)
    assert client.get_data(meta)["x"].is_nested is (kind in MANAGER_TYPES)
    client.close()


@pytest.mark.parametrize(
    ("kind", "config", "error", "text"),
    [
        ("NoSuchManager", {}, ValueError, "Unknown manager_type"),
        ("NoSuchManager", {}, AssertionError, "Unknown manager_type"),
        ("SimpleStorage", {}, ValueError, "zmq_info"),
        (5, {}, TypeError, "manager_type"),
        ("SimpleStorage", 5, TypeError, "config"),
        ("SimpleStorage", {"zmq_info": {}, "layout": "square"}, ValueError, "layout"),
    ],
)
def test_a_wrong_manager_is_refused_by_name(
    queue: Stack, kind: Any, config: Any, error: type[Exception], text: str
) -> None:
    client = tq.TransferQueueClient("one", queue.address)
    with pytest.raises(error, match=text):
        client.initialize_storage_manager(kind, config)
    assert type(client.storage_manager).__name__ == "AsyncSimpleStorageManager", "that of the queue"
    client.close()


def test_the_old_name_of_the_units_addresses_is_deprecated(queue: Stack) -> None:
    client = tq.TransferQueueClient("one", queue.address)
    with pytest.warns(DeprecationWarning, match="zmq_info"):
        client.initialize_storage_manager("SimpleStorage", {"storage_unit_infos": {}})
    client.close()


def test_unit_data_is_a_plain_store_with_a_limit() -> None:
    data = StorageUnitData(storage_size=2)
    data.put_data({"x": [10, 20]}, [1, 5])
    assert data.get_data(["x"], [5, 1]) == {"x": [20, 10]}
    with pytest.raises(ValueError, match="length mismatch"):
        data.put_data({"x": [1]}, [1, 2])
    with pytest.raises(ValueError, match="capacity"):
        data.put_data({"x": [1]}, [9])
    with pytest.raises(ValueError, match="not found"):
        data.get_data(["y"], [1])
    with pytest.raises(KeyError, match="not found"):
        data.get_data(["x"], [9])
    data.clear([1, 77])
    data.put_data({"x": [1]}, [9])
    assert data.get_data(["x"], [9, 5]) == {"x": [1, 20]}


class Handle:
    """A server object of this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_zmq_server_info(self) -> Any:
        return server_info(Role.STORAGE, self.name, "h:1")


def test_addresses_of_one_server_or_of_several_by_name() -> None:
    assert process_zmq_server_info(Handle("a")).id == "a"
    assert {name: info.id for name, info in process_zmq_server_info({0: Handle("a"), 1: Handle("b")}).items()} == {
        0: "a",
        1: "b",
    }
    with pytest.raises(TypeError, match="handlers"):
        process_zmq_server_info(5)


def test_helpers_of_addresses() -> None:
    address = get_node_ip_address()
    family = socket.AF_INET6 if is_ipv6_address(address) else socket.AF_INET
    port = get_free_port(address)
    with socket.socket(family) as probe:
        probe.bind((address, port))
    with pytest.raises(ValueError, match="ip"):
        get_free_port("192.0.2.77")
    assert [is_ipv6_address(text) for text in ("::1", "10.0.0.1", "name")] == [True, False, False]
    assert format_zmq_address("::1", 5) == "tcp://[::1]:5"
    assert format_zmq_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"


def test_helpers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in {"1": True, "True": True, "on": True, "0": False, "no": False, "": False}.items():
        monkeypatch.setitem(os.environ, "TQ_SOME_FLAG", text)
        assert get_env_bool("TQ_SOME_FLAG", True) is value
    assert get_env_bool("TQ_NO_SUCH_FLAG", True) is True
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "info")
    assert get_logger("transfer_queue.some").level == logging.INFO
    before = torch.get_num_threads()
    with limit_pytorch_auto_parallel_threads(1, info="a test"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert SameRole is Role
    assert [status.value for status in ProductionStatus] == [0, 1]
    with pytest.raises(ValueError, match="allowed: TransferQueueController"):
        Role("manager")
