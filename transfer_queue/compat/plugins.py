"""The registries through which 0.1.x took backends of users' own: they are kept, and lead to today's way by name.

Backends of this release store blocks, not rows (``transfer_queue.storage.base``) and are found through the entry-point
group ``transfer_queue.backends``. Classes registered here are checked and can be looked up and created; a client
stores through them only what is given to them directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.client.manager import MANAGER_TYPES, check_manager_config
from transfer_queue.client.parser import DataParser
from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError, RequestError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.config.server_info import ZMQServerInfo
    from transfer_queue.metadata import BatchMeta

__all__ = [
    "AsyncSimpleStorageManager",
    "KVStorageManager",
    "MooncakeStorageManager",
    "MooncakeStoreClient",
    "RayStorageClient",
    "RayStorageManager",
    "StorageBootstrapProvider",
    "StorageClientFactory",
    "StorageKVClient",
    "StorageManager",
    "StorageManagerFactory",
    "YuanrongStorageClient",
    "YuanrongStorageManager",
]

C = TypeVar("C", bound=type)
Bootstrap = Callable[[Any], Any]
_WAY = "plug a backend in through the entry-point group transfer_queue.backends, see transfer_queue/storage/base.py"


class StorageManager(ABC):
    """Stores and loads the rows of a batch. ``controller_info``: where the controller is; ``config``: its section."""

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        self.controller_info = controller_info
        self.config = config

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: DataParser | None = None) -> Any:
        """Write ``data`` to the rows of ``metadata``."""

    @abstractmethod
    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The rows and fields of ``metadata``."""

    @abstractmethod
    async def clear_data(self, metadata: BatchMeta) -> None:
        """Free the rows of ``metadata``."""

    async def notify_data_update(
        self,
        partition_id: str,
        global_indexes: list[int],
        field_schema: dict[str, Any],
        custom_backend_meta: Any = None,
    ) -> None:
        """Refused: rows become ready with the put that stores them, in one step. Raises RequestError."""
        raise RequestError(f"rows of {partition_id!r} cannot be declared ready without their data; {_WAY}")

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} has no checkpoints")

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} has no checkpoints")

    def close(self) -> None:  # noqa: B027 - a manager without connections need not have one
        """Give up connections. Idempotent."""


class StorageManagerFactory:
    """Managers by the value of ``backend.storage_backend``."""

    _classes: ClassVar[dict[str, type[StorageManager]]] = {}

    @classmethod
    def register(cls, manager_type: str) -> Callable[[C], C]:
        """Decorator. Raises InvalidTypeError unless the class is a subclass of StorageManager."""
        return _registering(cls._classes, manager_type, "manager_type", StorageManager)

    @classmethod
    def create(
        cls, manager_type: str, controller_info: ZMQServerInfo, config: Mapping[str, Any], **kwargs: Any
    ) -> StorageManager:
        """A manager. Raises ConfigError (a ValueError) for an unknown type."""
        kind = cls._classes.get(manager_type)
        if kind is None:
            raise ConfigError(f"Unknown manager_type: {manager_type!r}; there are {sorted(cls._classes)}")
        return kind(controller_info, config, **kwargs)


class KVStorageManager(StorageManager):
    """A manager over a client of a key-value store; ``config["client_name"]`` names it. Raises ConfigError without."""

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, config, zmq_context)
        if not config.get("client_name"):
            raise ConfigError("config.client_name is missing: the name that StorageClientFactory knows the client by")
        self.storage_client = StorageClientFactory.create(config["client_name"], config)

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: DataParser | None = None) -> list[Any]:
        """Values under ``<global index>@<field>``; returns what the client returned for each key."""
        if data_parser is not None:
            raise NotImplementedError("data_parser does not run with key-value backends")
        keys = _keys(metadata.global_indexes, [str(name) for name in data.keys()])  # noqa: SIM118
        values = [row for name in data.keys() for row in data.get(name).unbind(0)]  # noqa: SIM118
        return list(self.storage_client.put(keys, values) or [])

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The values put under the keys of ``metadata``, rows of a field stacked."""
        import torch
        from tensordict import TensorDict

        found = iter(self.storage_client.get(_keys(metadata.global_indexes, metadata.field_names)))
        columns = {name: [next(found) for _ in metadata.global_indexes] for name in metadata.field_names}
        return TensorDict({name: torch.stack(rows) for name, rows in columns.items()}, batch_size=[len(metadata)])

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Remove the keys of ``metadata``."""
        self.storage_client.clear(_keys(metadata.global_indexes, metadata.field_names))


def _keys(indexes: list[int], fields: list[str]) -> list[str]:
    return [f"{index}@{field}" for field in fields for index in indexes]


class _QueueManager(StorageManager):
    """What the built-in managers are today: a client of the queue, whose controller knows the backend."""

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


class StorageKVClient(ABC):
    """A client of a key-value store. ``config``: its section."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store values; returns something to remember for each key, or None."""

    @abstractmethod
    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Values in the order of ``keys``."""

    @abstractmethod
    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        """Remove keys."""


class StorageClientFactory:
    """Clients of key-value stores by name."""

    _classes: ClassVar[dict[str, type[StorageKVClient]]] = {}

    @classmethod
    def register(cls, client_type: str) -> Callable[[C], C]:
        """Decorator. Raises InvalidTypeError unless the class is a subclass of StorageKVClient."""
        return _registering(cls._classes, client_type, "client_type", StorageKVClient)

    @classmethod
    def create(cls, client_type: str, config: Mapping[str, Any]) -> StorageKVClient:
        """A client. Raises ConfigError (a ValueError) for an unknown type."""
        if client_type not in cls._classes:
            raise ConfigError(f"Unknown StorageClient: {client_type!r}; there are {sorted(cls._classes)}")
        return cls._classes[client_type](config)


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


class StorageBootstrapProvider:
    """Functions that start a store, by the name of the backend in any case."""

    _providers: ClassVar[dict[str, Bootstrap]] = {}

    @classmethod
    def register_provider(cls, name: str) -> Callable[[Bootstrap], Bootstrap]:
        """Decorator of ``fn(conf) -> resources``. Raises InvalidInputError for an empty name."""
        if not name:
            raise InvalidInputError("name must not be empty")

        def add(provider: Bootstrap) -> Bootstrap:
            cls._providers[name.lower()] = provider
            return provider

        return add

    @classmethod
    def get_provider(cls, name: str) -> Bootstrap | None:
        """None if there is none."""
        return cls._providers.get(name.lower())


def _registering(classes: dict[str, Any], name: str, argument: str, base: type) -> Callable[[C], C]:
    def add(kind: C) -> C:
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise InvalidTypeError(f"{argument}: {kind!r} must be a subclass of {base.__name__}")
        classes[name] = kind
        return kind

    return add


for _kind in (AsyncSimpleStorageManager, MooncakeStorageManager, YuanrongStorageManager, RayStorageManager):
    for _name in MANAGER_TYPES[_kind.manager_type]:
        StorageManagerFactory.register(_name)(_kind)
StorageManagerFactory.register("KVStorageManager")(KVStorageManager)
