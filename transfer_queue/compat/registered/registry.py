"""The registries through which 0.1.x takes backends of users' own, and the classes that they derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError, RequestError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.compat.server_info import ZMQServerInfo
    from transfer_queue.metadata import BatchMeta

__all__ = [
    "KVStorageManager",
    "StorageBootstrapProvider",
    "StorageClientFactory",
    "StorageKVClient",
    "StorageManager",
    "StorageManagerFactory",
]

C = TypeVar("C", bound=type)
Bootstrap = Callable[[Any], Any]
Metas = dict[int, dict[str, Any]]
"""Global index -> field -> what is to be given back with it."""


class StorageManager(ABC):
    """Stores and loads the rows of a batch. ``controller_info``: where the controller is; ``config``: its section.

    A queue whose ``backend.storage_backend`` names a registered manager keeps its rows there: each put comes as one row
    or a few, of one field, which holds the bytes of all of the put's rows (uint8). Methods are called on one thread.
    """

    on_stored: Callable[[Metas], None] | None = None
    """Set by the queue that uses this manager."""
    of_queue: ClassVar[bool] = False
    """Does it read and write a queue that keeps its rows elsewhere?"""

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        self.controller_info = controller_info
        self.config = config

    @abstractmethod
    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> Any:
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
        custom_backend_meta: Metas | None = None,
        custom_meta: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """Say, within ``put_data``, that the rows are stored; ``custom_backend_meta`` comes back with them.

        Raises RequestError for rows that no queue gave to this manager: what stores rows makes them ready.
        """
        if self.on_stored is None:
            raise RequestError(
                f"rows of {partition_id!r} cannot be declared ready without their data: name the manager in "
                "backend.storage_backend, and the rows of the queue are stored through it"
            )
        self.on_stored(custom_backend_meta or {})

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
            raise ConfigError(
                f"Unknown manager_type: {manager_type!r}; there are {sorted(cls._classes)}. One of your own is known "
                "to the processes that have imported the module which registers it"
            )
        return kind(controller_info, config, **kwargs)

    @classmethod
    def stores_by_itself(cls, manager_type: str) -> bool:
        """Is it the name of a registered manager in which a queue may keep its rows?"""
        kind = cls._classes.get(manager_type)
        return kind is not None and not kind.of_queue


class KVStorageManager(StorageManager):
    """A manager over a client of a key-value store; ``config["client_name"]`` names it. Raises ConfigError without."""

    def __init__(self, controller_info: ZMQServerInfo, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, config, zmq_context)
        if not config.get("client_name"):
            raise ConfigError("config.client_name is missing: the name that StorageClientFactory knows the client by")
        self.storage_client = StorageClientFactory.create(config["client_name"], config)

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> list[Any]:
        """Values under ``<global index>@<field>``; returns what the client returned for each key.

        That is kept in ``metadata`` as well. Raises RequestError if the client returned it for other keys too, or not
        for all.
        """
        if data_parser is not None:
            raise NotImplementedError("data_parser does not run with key-value backends")
        fields = sorted(str(name) for name in data.keys())  # noqa: SIM118
        keys = _keys(metadata.global_indexes, fields)
        values = [row for name in fields for row in data.get(name).unbind(0)]
        metas = list(self.storage_client.put(keys, values) or [])
        if metas and len(metas) != len(keys):
            raise RequestError(
                f"{type(self.storage_client).__name__}.put returned {len(metas)} entries for {len(keys)} keys"
            )
        for (field, position), meta in zip(_places(metadata, fields), metas, strict=False):
            metadata._custom_backend_meta[position][field] = meta
        return metas

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The values put under the keys of ``metadata``, rows of a field stacked: jagged where their shapes differ."""
        from tensordict import TensorDict

        fields = sorted(metadata.field_names)
        values = self.storage_client.get(
            _keys(metadata.global_indexes, fields),
            shapes=[shape for field in fields for shape in metadata.get_shapes(field)],
            dtypes=[dtype for field in fields for dtype in metadata.get_dtypes(field)],
            custom_backend_meta=_metas(metadata, fields),
        )
        if len(values) != len(fields) * len(metadata):
            raise RequestError(
                f"{type(self.storage_client).__name__}.get returned {len(values)} values for "
                f"{len(fields) * len(metadata)} keys"
            )
        found = iter(values)
        columns = {name: [next(found) for _ in metadata.global_indexes] for name in fields}
        return TensorDict({name: _stacked(rows) for name, rows in columns.items()}, batch_size=[len(metadata)])

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Remove the keys of ``metadata``."""
        fields = sorted(metadata.field_names)
        self.storage_client.clear(_keys(metadata.global_indexes, fields), custom_backend_meta=_metas(metadata, fields))

    def close(self) -> None:
        self.storage_client.close()


def _keys(indexes: list[int], fields: list[str]) -> list[str]:
    return [f"{index}@{field}" for field in fields for index in indexes]


def _places(metadata: BatchMeta, fields: list[str]) -> Iterator[tuple[str, int]]:
    """(field, position of the row), in the order of the keys."""
    return ((field, position) for field in fields for position in range(len(metadata)))


def _metas(metadata: BatchMeta, fields: list[str]) -> list[Any]:
    return [metadata._custom_backend_meta[position].get(field) for field, position in _places(metadata, fields)]


def _stacked(rows: list[Any]) -> Any:
    import torch
    from tensordict import NonTensorStack

    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack(*rows)
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class StorageKVClient(ABC):
    """A client of a key-value store. ``config``: its section."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        """Store values; returns something plain to remember for each key, or None."""

    @abstractmethod
    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Values in the order of ``keys``; ``custom_backend_meta`` is what ``put`` returned for each."""

    @abstractmethod
    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        """Remove keys."""

    def close(self) -> None:  # noqa: B027 - a client without connections need not have one
        """Give up connections. Idempotent."""


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


class StorageBootstrapProvider:
    """Functions that start a store, by the name of the backend in any case.

    ``init`` calls that of a registered manager with the merged settings, which it may change, before it starts the
    queue, and keeps what it returns as long as the queue.
    """

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


StorageManagerFactory.register("KVStorageManager")(KVStorageManager)
