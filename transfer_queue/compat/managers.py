"""``initialize_storage_manager``: which backends 0.1.x names how, and the layout that goes with it."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from transfer_queue.client.parser import DataParser
from transfer_queue.compat.registered.registry import StorageManagerFactory
from transfer_queue.compat.server_info import JOIN_PORT_NAME, ZMQServerInfo
from transfer_queue.errors import ConfigError, ConnectionLostError, InvalidTypeError, StartError
from transfer_queue.runtime.secret import masked, new_nonce, prove

if TYPE_CHECKING:
    from tensordict import TensorDict

    from transfer_queue.client.client import AsyncClient
    from transfer_queue.metadata import BatchMeta

__all__ = [
    "MANAGER_TYPES",
    "ClientStorageManager",
    "UnknownManagerError",
    "check_manager_config",
    "check_registered",
    "join_units",
    "manager_layout",
]

_JOIN_S = 90.0
"""Time limit of a join. It is longer than the start of a unit."""

MANAGER_TYPES: dict[str, tuple[str, ...]] = {
    "SimpleStorage": ("SimpleStorage", "AsyncSimpleStorageManager"),
    "MooncakeStore": ("MooncakeStore", "MooncakeStorageManager"),
    "Yuanrong": ("Yuanrong", "YuanrongStorageManager"),
    "RayStore": ("RayStore", "RayStorageManager"),
}
"""Backend -> its names from 0.1.6 on, and in 0.1.5."""
_SECTIONS = {"simple": "SimpleStorage", "mooncake": "MooncakeStore", "yuanrong": "Yuanrong", "ray": "RayStore"}
"""Backend -> its section of the settings."""
_STORE_SETTINGS = (
    "metadata_server",
    "master_server_address",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "device_name",
)
"""Settings of a Mooncake manager that identify its store."""
_BUILT_IN_CLIENTS = {"MooncakeStoreClient", "MooncakeStorageClient", "YuanrongStorageClient", "RayStorageClient"}
"""Values of ``client_name`` of a ``KVStorageManager`` that name a built-in backend of 0.1.x."""


class UnknownManagerError(ConfigError, AssertionError):
    """The error of 0.1.5 (ValueError) and 0.1.11 (AssertionError) for an unknown manager."""


class ClientStorageManager:
    """``client.storage_manager``: the client's own way to storage, by the names of 0.1.x."""

    def __init__(self, client: AsyncClient, manager_type: str, config: Mapping[str, Any]) -> None:
        self.manager_type = manager_type
        self.config = config
        self._client = client

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: DataParser | None = None) -> None:
        """Write ``data`` to the rows of ``metadata``; see ``Client.put``."""
        await self._client.async_put(data, metadata, data_parser=data_parser)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """See ``Client.get_data``."""
        return await self._client.async_get_data(metadata)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """See ``Client.clear_samples``."""
        await self._client.async_clear_samples(metadata)

    def close(self) -> None:
        """Nothing to give up: the connections are the client's."""


def manager_of_backend(client: AsyncClient, kind: str) -> ClientStorageManager:
    """The manager of a client that was given none: that of the queue's backend, with the class name of 0.1.x."""
    section = _SECTIONS.get(kind)
    if section is None:
        return ClientStorageManager(client, kind, {})
    name = MANAGER_TYPES[section][-1]
    made: ClientStorageManager = type(name, (ClientStorageManager,), {"__doc__": ClientStorageManager.__doc__})(
        client, section, {}
    )
    return made


def check_manager_config(manager_type: object, config: object) -> Mapping[str, Any]:
    """Raises UnknownManagerError; InvalidTypeError; ConfigError where the units' addresses are missing."""
    if not isinstance(manager_type, str):
        raise InvalidTypeError(f"manager_type must be a string, not {type(manager_type).__name__}")
    built_in = [name for names in MANAGER_TYPES.values() for name in names]
    if manager_type not in built_in and not StorageManagerFactory.stores_by_itself(manager_type):
        raise UnknownManagerError(
            f"Unknown manager_type: {manager_type!r}; there are {', '.join(sorted(built_in))}. One of your own is "
            "registered with StorageManagerFactory before"
        )
    if not isinstance(config, Mapping):
        raise InvalidTypeError(f"config must be a mapping, not {type(config).__name__}")
    if manager_type in MANAGER_TYPES["SimpleStorage"] and "zmq_info" not in config:
        if "storage_unit_infos" not in config:
            raise ConfigError("config: zmq_info is missing: the addresses of the storage units by name")
        if manager_type == "SimpleStorage":
            warnings.warn("config: storage_unit_infos is called zmq_info now", DeprecationWarning, stacklevel=4)
    return config


def check_registered(manager_type: str, config: Mapping[str, Any], backend: str, settings: Mapping[str, Any]) -> None:
    """A registered manager must be the one that the queue of this ``backend`` keeps its rows in. Raises ConfigError."""
    if not StorageManagerFactory.stores_by_itself(manager_type) or config.get("client_name") in _BUILT_IN_CLIENTS:
        return
    if backend != "registered" or settings["manager"] != manager_type:
        where = f"manager {settings['manager']!r}" if backend == "registered" else f"backend {backend!r}"
        raise ConfigError(
            f"manager_type: this queue keeps its rows in {where}, not in {manager_type!r}; start it with "
            f"transfer_queue.init() and backend.storage_backend: {manager_type}"
        )


def join_units(config: Mapping[str, Any], controller: str, secret: str | None = None) -> None:
    """Tell storage units of ``config`` that wait for their controller where it is, and the ``secret`` of its queue.

    Others, which dialled in to their controller by themselves, need not be told. Raises ConnectionLostError,
    StartError.
    """
    infos = config.get("zmq_info") or config.get("storage_unit_infos") or {}
    for info in infos.values() if isinstance(infos, Mapping) else infos:
        if isinstance(info, ZMQServerInfo) and JOIN_PORT_NAME in info.ports:
            _ask(info, {"controller": controller, "secret": secret})


def join_store(manager_type: str, config: Mapping[str, Any], controller: object) -> bool:
    """Move the controller of a program to the Mooncake store of ``config``, which then keeps its rows.

    Returns False if the controller does not accept a store, or ``config`` names no master or names storage units.
    Raises like `join_units`.
    """
    units = config.get("zmq_info") or config.get("storage_unit_infos")
    if manager_type not in MANAGER_TYPES["MooncakeStore"] or units or not config.get("master_server_address"):
        return False
    if not isinstance(controller, ZMQServerInfo) or JOIN_PORT_NAME not in controller.ports:
        return False
    section = {name: config[name] for name in _STORE_SETTINGS if config.get(name) is not None}
    _ask(controller, {"mooncake": section})
    return True


def _ask(info: ZMQServerInfo, asked: dict[str, Any]) -> None:
    port, nonce = info.ports[JOIN_PORT_NAME], new_nonce()
    if info.secret is not None:
        if asked.get("secret"):
            asked = {**asked, "secret": masked(asked["secret"], info.secret, port, nonce)}
        asked = {**asked, "nonce": nonce.hex(), "proof": prove(info.secret, "client", port, nonce).hex()}
    try:
        with socket.create_connection((info.ip, port), timeout=_JOIN_S) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline() or b'{"error": "no answer"}')
    except (OSError, ValueError) as error:
        raise ConnectionLostError(f"{info.id} at {info.address(JOIN_PORT_NAME)}: {error}") from None
    if "error" in answer:
        raise StartError(f"{info.id}: {answer['error']}")


def manager_layout(manager_type: str, config: Mapping[str, Any]) -> Literal["jagged", "dense"] | None:
    """The layout that a client gets: as ``config["layout"]`` says; dense for the names of 0.1.5; else as it is."""
    layout = config.get("layout")
    if layout is not None:
        if layout not in ("jagged", "dense"):
            raise ConfigError(f"config: layout must be jagged or dense, not {layout!r}")
        return "dense" if layout == "dense" else "jagged"
    old = {names[-1] for names in MANAGER_TYPES.values()} | {"KVStorageManager"}
    return "dense" if manager_type in old else None
