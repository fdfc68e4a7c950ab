"""The clients: `AsyncTransferQueueClient`, and `TransferQueueClient` with a blocking method for each of its methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from transfer_queue.client.arguments import check_text
from transfer_queue.client.engine import Engine
from transfer_queue.client.io import IoThread, shared_io
from transfer_queue.client.kv import KvOperations
from transfer_queue.client.operation import Operation, run_async, run_sync
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.parser import DataParser
from transfer_queue.client.rows import RowOperations
from transfer_queue.config.attach import AttachConfig, AttachSecurity, ControllerAddresses
from transfer_queue.errors import InvalidInputError, InvalidTypeError, NotInitializedError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from transfer_queue.metadata import BatchMeta

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]

R = TypeVar("R")
T = TypeVar("T")
Out: TypeAlias = "TensorDict | Mapping[str, torch.Tensor]"
Device: TypeAlias = "str | int | torch.device | None"
Status = tuple["torch.Tensor | None", "torch.Tensor | None"]


class AsyncTransferQueueClient:
    """A client of one queue. Methods may be awaited from any number of event loops and threads, also after a fork.

    ``controller_info``: where the queue is: an ``AttachConfig`` or ``"host:port"``. Connecting happens in the
    constructor. Raises ConnectionLostError if the controller cannot be reached.
    """

    def __init__(
        self,
        client_id: str,
        controller_info: AttachConfig | str,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        for name, value in (("zmq_io_threads", zmq_io_threads), ("zmq_max_sockets", zmq_max_sockets)):
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be at least 1, not {value}; it has no further effect")
        self.client_id = check_text("client_id", client_id)
        self.config = _attach_config(controller_info)
        self._options = ClientOptions.of(self.config)
        self._pid = 0
        self._closed = False
        self._attach()

    def _attach(self) -> None:
        self._io: IoThread = shared_io()
        self._engine = self._io.wait(self._open())
        self._rows = RowOperations(self._engine, self._options)
        self._kv = KvOperations(self._engine, self._options)
        self._pid = os.getpid()

    async def _open(self) -> Engine:
        io = shared_io()
        engine = Engine(self.config.controller.addresses, self.client_id, io.run_copy)
        await engine.open(self._options.connect_s)
        return engine

    def _ready(self) -> None:
        """Before building an operation: closed? In a forked child, attach anew."""
        if self._closed:
            raise NotInitializedError(f"client {self.client_id} is closed; call transfer_queue.init() to attach again")
        if self._pid != os.getpid():
            self._attach()

    def _sync(self, operation: Operation[R, T]) -> T:
        return run_sync(self._io, operation)

    async def _async(self, operation: Operation[R, T]) -> T:
        return await run_async(self._io, operation)

    def give_up(self, reason: str) -> None:
        """The queue is gone for good: its calls raise ConnectionLostError with ``reason``. From any thread."""
        if not self._closed and self._pid == os.getpid() and self._io.alive:
            self._io.loop.call_soon_threadsafe(self._engine.give_up, reason)

    def close(self) -> None:
        """Give up the connections. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._pid == os.getpid() and self._io.alive:
                self._io.wait(self._engine.close(), timeout_s=5.0)

    @property
    def engine(self) -> Engine:
        self._ready()
        return self._engine

    @property
    def rows(self) -> RowOperations:
        self._ready()
        return self._rows

    @property
    def kv(self) -> KvOperations:
        self._ready()
        return self._kv

    # -------------------------------------------------------------------------------------------------- rows by index

    async def async_get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Rows as metadata.

        ``mode`` ``"fetch"``: exactly ``batch_size`` rows whose ``data_fields`` are all ready and which ``task_name``
        has not consumed; they count as consumed from now on. Waits ``timeout`` seconds (default: 5) for enough rows,
        then raises WaitTimeoutError; with the controller in polling mode answers with an empty batch at once.
        ``"force_fetch"``: all rows of the partition in any state. ``"insert"``: ``batch_size`` new rows without data.
        """
        return await self._async(
            self.rows.get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config, timeout)
        )

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
    ) -> BatchMeta:
        """Write ``data`` to the rows of ``metadata``, or append it to ``partition_id`` as new rows.

        All or nothing within a partition. Raises CapacityError, InvalidInputError.
        """
        return await self._async(self.rows.put(data, metadata, partition_id, data_parser))

    async def async_get_data(
        self, metadata: BatchMeta, *, zero_copy: bool = False, out: Out | None = None, device: Device = None
    ) -> TensorDict:
        """The fields of ``metadata`` of all its rows, in its order, as independent tensors.

        ``zero_copy``, ``out``, ``device``: see ``transfer_queue.kv_batch_get``.
        """
        return await self._async(self.rows.get_data(metadata, zero_copy=zero_copy, out=out, device=device))

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge ``metadata.custom_meta`` into the rows' tags."""
        await self._async(self.rows.set_custom_meta(metadata))

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Forget rows and free their storage. Idempotent."""
        await self._async(self.rows.clear_samples(metadata))

    async def async_clear_partition(self, partition_id: str) -> None:
        """Forget a whole partition. Idempotent."""
        await self._async(self.rows.clear_partition(partition_id))

    async def async_get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """``(indexes (n,), produced (n, fields))``; ``(None, None)`` for an unknown partition or field."""
        return await self._async(self.rows.production_status(data_fields, partition_id))

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """``(indexes (n,), consumed (n,))``; ``(None, None)`` for an unknown partition."""
        return await self._async(self.rows.consumption_status(task_name, partition_id))

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Are ``data_fields`` produced for all rows of the partition?"""
        return _all(await self.async_get_production_status(data_fields, partition_id))

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Has ``task_name`` consumed all rows of the partition?"""
        return _all(await self.async_get_consumption_status(task_name, partition_id))

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Make rows fetchable again for ``task_name``, or for every task."""
        return await self._async(self.rows.reset_consumption(partition_id, task_name))

    async def async_get_partition_list(self) -> list[str]:
        """Names of partitions in the order of their creation."""
        return await self._async(self.rows.partition_list())

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Rows of ``keys``; missing ones are left out, or created without data."""
        return await self._async(self.kv.retrieve_meta(keys, partition_id, create))

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Keys of rows. RequestError for a row without key."""
        return await self._async(self.kv.retrieve_keys(global_indexes, partition_id))

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """``{partition: {key: tag}}``."""
        return await self._async(self.kv.list_keys(partition_id))


class TransferQueueClient(AsyncTransferQueueClient):
    """Adds blocking methods. They may be called inside a running event loop, which they block."""

    def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """See ``async_get_meta``."""
        return self._sync(
            self.rows.get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config, timeout)
        )

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
    ) -> BatchMeta:
        """See ``async_put``."""
        return self._sync(self.rows.put(data, metadata, partition_id, data_parser))

    def get_data(
        self, metadata: BatchMeta, *, zero_copy: bool = False, out: Out | None = None, device: Device = None
    ) -> TensorDict:
        """See ``async_get_data``."""
        return self._sync(self.rows.get_data(metadata, zero_copy=zero_copy, out=out, device=device))

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """See ``async_set_custom_meta``."""
        self._sync(self.rows.set_custom_meta(metadata))

    def clear_samples(self, metadata: BatchMeta) -> None:
        """See ``async_clear_samples``."""
        self._sync(self.rows.clear_samples(metadata))

    def clear_partition(self, partition_id: str) -> None:
        """See ``async_clear_partition``."""
        self._sync(self.rows.clear_partition(partition_id))

    def get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """See ``async_get_production_status``."""
        return self._sync(self.rows.production_status(data_fields, partition_id))

    def get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """See ``async_get_consumption_status``."""
        return self._sync(self.rows.consumption_status(task_name, partition_id))

    def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """See ``async_check_production_status``."""
        return _all(self.get_production_status(data_fields, partition_id))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """See ``async_check_consumption_status``."""
        return _all(self.get_consumption_status(task_name, partition_id))

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """See ``async_reset_consumption``."""
        return self._sync(self.rows.reset_consumption(partition_id, task_name))

    def get_partition_list(self) -> list[str]:
        """See ``async_get_partition_list``."""
        return self._sync(self.rows.partition_list())

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """See ``async_kv_retrieve_meta``."""
        return self._sync(self.kv.retrieve_meta(keys, partition_id, create))

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """See ``async_kv_retrieve_keys``."""
        return self._sync(self.kv.retrieve_keys(global_indexes, partition_id))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """See ``async_kv_list``."""
        return self._sync(self.kv.list_keys(partition_id))

    def run(self, operation: Operation[R, T]) -> T:
        """Carry out an operation of ``rows`` or ``kv`` and wait for its result."""
        return self._sync(operation)

    async def async_run(self, operation: Operation[R, T]) -> T:
        """Carry out an operation of ``rows`` or ``kv``."""
        return await self._async(operation)


def _attach_config(controller_info: AttachConfig | str) -> AttachConfig:
    if controller_info is None:
        raise InvalidInputError("controller_info is None; pass an AttachConfig or host:port")
    if isinstance(controller_info, AttachConfig):
        return controller_info
    if isinstance(controller_info, str):
        return AttachConfig(
            controller=ControllerAddresses(addresses=[controller_info]), security=AttachSecurity(allow_pickle=True)
        )
    raise InvalidTypeError(
        f"controller_info must be an AttachConfig or host:port, not {type(controller_info).__name__}"
    )


def _all(status: Status) -> bool:
    return status[1] is not None and status[1].numel() > 0 and bool(status[1].all())
