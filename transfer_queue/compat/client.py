"""The clients that programs import: `client.Client`, with the constructor and the additional members of 0.1.x."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn

from transfer_queue.client.arguments import check_count
from transfer_queue.client.client import AsyncClient, Client
from transfer_queue.client.options import missing_fields
from transfer_queue.compat.managers import (
    ClientStorageManager,
    check_manager_config,
    check_registered,
    join_store,
    join_units,
    manager_layout,
    manager_of_backend,
)
from transfer_queue.compat.server_info import ZMQServerInfo, attach_config
from transfer_queue.config.attach import AttachConfig, ControllerAddresses, parse_address
from transfer_queue.errors import ConfigError, InvalidInputError, InvalidTypeError, UnsupportedRequestError
from transfer_queue.launch.discovery import queue_at

__all__ = ["AsyncTransferQueueClient", "RegisterBufferType", "TransferQueueClient", "attach_config_of"]


class RegisterBufferType(Enum):
    """Purpose of a registered buffer, as a private 0.1.5 names it. Here a get returns copies and holds no buffer."""

    GET_BYTES = "get_bytes"
    GET_TENSOR = "get_tensor"
    PUT_TENSOR = "put_tensor"
    PUT_BYTES = "put_bytes"


class AsyncTransferQueueClient(AsyncClient):
    """A client of one queue. Methods may be awaited from any number of event loops and threads, also after a fork.

    Args:
        client_id: Name of the client in messages and metrics.
        controller_info: The queue: an ``AttachConfig``, a ``ZMQServerInfo`` or ``"host:port"``. The constructor
            connects to it.
        zmq_io_threads: Ignored, but must be at least 1.
        zmq_max_sockets: Ignored, but must be at least 1.

    Raises:
        InvalidInputError, InvalidTypeError: An argument is wrong.
        ConnectionLostError: The controller does not answer.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: AttachConfig | ZMQServerInfo | str,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        for name, value in (("zmq_io_threads", zmq_io_threads), ("zmq_max_sockets", zmq_max_sockets)):
            if value is not None and check_count(name, value) < 1:
                raise InvalidInputError(f"{name} must be at least 1, not {value}; it has no further effect")
        self._controller_info = controller_info
        self._manager: ClientStorageManager | None = None
        super().__init__(client_id, attach_config_of(controller_info))

    @property
    def storage_manager(self) -> ClientStorageManager:
        """The storage manager: of `initialize_storage_manager`, or else of the backend of the queue."""
        if self._manager is None:
            self._manager = manager_of_backend(self, self.engine.backend_kind)
        return self._manager

    def initialize_storage_manager(self, manager_type: str, config: Mapping[str, Any]) -> None:
        """Accept what 0.1.x needs before a put or get. Here the controller tells a client how to reach storage.

        Afterwards gets by key leave out named fields that not all rows have, as 0.1.x does, unless ``missing_fields``
        of the settings says otherwise. Storage units of ``config`` that wait for their controller get its address.

        Args:
            manager_type: A name of 0.1.5 (``AsyncSimpleStorageManager``, ...) switches this client to the dense layout
                of that release. A name of 0.1.6 and later leaves the layout as it is.
            config: The section of the manager. ``config["layout"]`` (``"jagged"`` or ``"dense"``) decides the layout
                in any case.

        Raises:
            UnknownManagerError: No such manager; also a ValueError and an AssertionError.
            InvalidTypeError, ConfigError: An argument is wrong.
            ConnectionLostError, StartError: A server of ``config`` does not answer or does not start.
        """
        config = check_manager_config(manager_type, config)
        layout = manager_layout(manager_type, config)
        if join_store(manager_type, config, self._controller_info):
            self._reattach()  # the controller has restarted
        check_registered(manager_type, config, self.engine.backend_kind, self.engine.backend_settings)
        join_units(config, self.config.controller.addresses[0], self.config.security.secret)
        missing = missing_fields(self.config.missing_fields, compatible=True)
        self._use(replace(self._options, layout=layout or self._options.layout, missing_fields=missing))
        self._manager = ClientStorageManager(self, manager_type, config)

    async def async_reset_zero_copy_all_keys_free(self, buffer_type: RegisterBufferType) -> None:
        """Do nothing: a get returns independent tensors, and a put no longer needs its tensors when it returns.

        Raises InvalidTypeError, NotInitializedError.
        """
        if not isinstance(buffer_type, RegisterBufferType):
            raise InvalidTypeError(f"buffer_type must be a RegisterBufferType, not {type(buffer_type).__name__}")
        self._ready()

    async def async_save_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_controller_checkpoint", "save_checkpoint")

    async def async_load_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_controller_checkpoint", "load_checkpoint")

    async def async_save_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_storage_checkpoint", "save_checkpoint")

    async def async_load_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_storage_checkpoint", "load_checkpoint")


class TransferQueueClient(AsyncTransferQueueClient, Client):
    """Adds a blocking method for each ``async_`` one. Inside a running event loop they work, and block it.

    The constructor and the errors are the same as for `AsyncTransferQueueClient`.
    """

    def save_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_controller_checkpoint", "save_checkpoint")

    def load_controller_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_controller_checkpoint", "load_checkpoint")

    def save_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.save_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("save_storage_checkpoint", "save_checkpoint")

    def load_storage_checkpoint(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Refused: use ``transfer_queue.load_checkpoint``. Raises UnsupportedRequestError."""
        _refuse("load_storage_checkpoint", "load_checkpoint")


def attach_config_of(controller_info: AttachConfig | ZMQServerInfo | str) -> AttachConfig:
    """Convert ``controller_info`` of a client to settings. Raises InvalidInputError, InvalidTypeError."""
    if controller_info is None:
        raise InvalidInputError("controller_info is None; pass an AttachConfig, a ZMQServerInfo or host:port")
    if isinstance(controller_info, AttachConfig):
        return controller_info
    if isinstance(controller_info, ZMQServerInfo):
        found = attach_config(controller_info)
        known = None if controller_info.secret is not None else queue_at(found.controller.addresses[0])
        return found if known is None else known.model_copy(update={"missing_fields": found.missing_fields})
    if isinstance(controller_info, str):
        try:
            parse_address(controller_info)
        except ConfigError as error:
            raise InvalidInputError(f"controller_info: {error}") from None
        return queue_at(controller_info) or AttachConfig(controller=ControllerAddresses(addresses=[controller_info]))
    raise InvalidTypeError(
        f"controller_info must be an AttachConfig, a ZMQServerInfo or host:port, not {type(controller_info).__name__}"
    )


def _ignore_socket(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The coroutine function with the keyword ``socket`` of 0.1.x, which has no effect there either."""

    @functools.wraps(call)
    async def without(*args: Any, socket: object = None, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    own = inspect.signature(call)
    socket = inspect.Parameter("socket", inspect.Parameter.KEYWORD_ONLY, default=None)
    without.__signature__ = own.replace(parameters=[*own.parameters.values(), socket])  # type: ignore[attr-defined]
    return without


for _name in (
    *("check_consumption_status", "check_production_status", "get_consumption_status", "get_meta"),
    *("get_partition_list", "get_production_status", "kv_list", "kv_retrieve_keys", "kv_retrieve_meta"),
    *("load_controller_checkpoint", "reset_consumption", "save_controller_checkpoint", "set_custom_meta"),
):
    _call = getattr(AsyncTransferQueueClient, f"async_{_name}")
    setattr(AsyncTransferQueueClient, f"async_{_name}", _ignore_socket(_call))


def _refuse(call: str, instead: str) -> NoReturn:
    raise UnsupportedRequestError(
        f"{call} is not available: metadata and data that are written one after the other do not fit each other while "
        f"producers run; call transfer_queue.{instead}, which takes both at one moment"
    )
