"""The built-in managers and clients of 0.1.x: today's queue under their names.

What users derive from, and the registries, are in ``transfer_queue.compat.registered.registry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transfer_queue.client.parser import DataParser
from transfer_queue.compat.client import TransferQueueClient
from transfer_queue.compat.managers import MANAGER_TYPES, check_manager_config
from transfer_queue.compat.registered.registry import StorageManager, StorageManagerFactory
from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.compat.server_info import ZMQServerInfo
    from transfer_queue.metadata import BatchMeta

__all__ = [
    "AsyncSimpleStorageManager",
    "MooncakeStorageManager",
    "MooncakeStoreClient",
    "RayStorageClient",
    "RayStorageManager",
    "StorageManagerFactory",
    "YuanrongStorageClient",
    "YuanrongStorageManager",
]


class _QueueManager(StorageManager):
    """A built-in manager: a client of the queue, whose controller knows the backend."""

    of_queue = True
    manager_type: ClassVar[str]

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, config, zmq_context)
        check_manager_config(self.manager_type, config)
        self._client = TransferQueueClient(f"{self.manager_type}_manager", controller_info)
        self._client.initialize_storage_manager(self.manager_type, config)

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: DataParser | None = None) -> None:
        await self._client.async_put(data, metadata, data_parser=data_parser)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        return await self._client.async_get_data(metadata)

    async def clear_data(self, metadata: BatchMeta) -> None:
        await self._client.async_clear_samples(metadata)

    def close(self) -> None:
        self._client.close()


class AsyncSimpleStorageManager(_QueueManager):
    """Rows of a queue whose storage units keep them in memory."""

    manager_type = "SimpleStorage"


class MooncakeStorageManager(_QueueManager):
    """Rows of a queue on Mooncake."""

    manager_type = "MooncakeStore"


class YuanrongStorageManager(_QueueManager):
    """Rows of a queue on Yuanrong."""

    manager_type = "Yuanrong"


class RayStorageManager(_QueueManager):
    """Rows of a queue on Ray's object store."""

    manager_type = "RayStore"


class _OwnEngineClient:
    """A built-in client of 0.1.x: clients of this release move bytes through the store's engine themselves."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        raise ConfigError(f"{type(self).__name__} is not used by itself in this release; use transfer_queue.init()")


class MooncakeStoreClient(_OwnEngineClient):
    """Raises ConfigError when it is made."""


class YuanrongStorageClient(_OwnEngineClient):
    """Raises ConfigError when it is made."""


class RayStorageClient(_OwnEngineClient):
    """Raises ConfigError when it is made."""


for _kind in (AsyncSimpleStorageManager, MooncakeStorageManager, YuanrongStorageManager, RayStorageManager):
    for _name in MANAGER_TYPES[_kind.manager_type]:
        StorageManagerFactory.register(_name)(_kind)
