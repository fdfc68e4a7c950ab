"""The clients: `AsyncClient`, and `Client` with a blocking method for each of its methods."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar

from transfer_queue.client.arguments import check_text
from transfer_queue.client.io import IoThread, shared_io
from transfer_queue.client.kv import KvOperations
from transfer_queue.client.notices import Notices
from transfer_queue.client.operation import Operation, carry_out
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.parser import DataParser
from transfer_queue.client.read_options import ReadOptions
from transfer_queue.client.rows import FetchOptions, RowOperations
from transfer_queue.client.shards import QueueEngine, attach
from transfer_queue.client.twins import blocking
from transfer_queue.config.attach import AttachConfig
from transfer_queue.errors import InvalidTypeError, NotInitializedError, TransferQueueError

if TYPE_CHECKING:
    import torch
    from opentelemetry.trace import Tracer
    from tensordict import TensorDict

    from transfer_queue.metadata import BatchMeta

__all__ = ["AsyncClient", "Client"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Out: TypeAlias = "TensorDict | Mapping[str, torch.Tensor]"
Device: TypeAlias = "str | int | torch.device | None"
Layout: TypeAlias = Literal["jagged", "dense"]
Status = tuple["torch.Tensor | None", "torch.Tensor | None"]
log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_REATTACH_S = 5.0
_attaching = threading.Lock()
"""Lock of forked children, whose threads may use a client at the same time."""


class AsyncClient:
    """A client of one queue. Methods may be awaited from any number of event loops and threads, also after a fork.

    Args:
        client_id: Name of the client in messages and metrics.
        config: The queue. The constructor connects to it.

    Raises:
        InvalidInputError, InvalidTypeError: An argument is wrong.
        ConnectionLostError: The controller does not answer.
    """

    def __init__(self, client_id: str, config: AttachConfig) -> None:
        self.client_id = check_text("client_id", client_id)
        self.config = config
        self._options = ClientOptions.of(config)
        self._tracer = _tracer(self._options)
        self._pid = 0
        self._closed = False
        self._attach()

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            f"client {self.client_id} cannot be pickled or copied: its connections are this process's; in another one "
            "call transfer_queue.init() and get_client(), or make one with this one's config"
        )

    def _attach(self) -> None:
        self._io: IoThread = shared_io()
        self._engine = self._io.wait(self._open())
        pickles = self._engine.controller_attributes.get("pickle")
        self._options = self._options.decided(self.config.security.allow_pickle, pickles, self._engine.know_servers)
        self._build_operations()
        self._pid = os.getpid()

    def _reattach(self) -> None:
        """Close the connections and open new ones."""
        self._io.wait(self._engine.close(), timeout_s=_REATTACH_S)
        self._attach()

    def _use(self, options: ClientOptions) -> None:
        self._options = options
        self._build_operations()

    def _build_operations(self) -> None:
        notices = Notices(self._engine, self._options.request_s)
        self._rows = RowOperations(self._engine, self._options, notices)
        self._kv = KvOperations(self._engine, self._options, notices)

    async def _open(self) -> QueueEngine:
        config = self.config
        return await attach(
            config.controller.addresses,
            self.client_id,
            shared_io().run_copy,
            config.security,
            self._options.connect_s,
            config.target,
        )

    def _ready(self) -> None:
        """Check that the client is open; attach a forked child."""
        if self._closed:
            raise NotInitializedError(f"client {self.client_id} is closed; call transfer_queue.init() to attach again")
        if self._pid != os.getpid():
            with _attaching:
                if self._pid != os.getpid():  # another thread was faster
                    self._attach()

    async def async_run(self, build: Callable[P, Operation[R, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Build an operation of ``rows`` or ``kv`` with these arguments, carry it out and return its result."""
        span_name = getattr(build, "span_name", "")
        if self._tracer is None or not span_name:
            return await carry_out(self._io, build(*args, **kwargs))
        from transfer_queue.client.tracing import traced

        operation = traced(self._tracer, self._engine, span_name, partial(build, *args, **kwargs))
        return await carry_out(self._io, operation)

    def give_up(self, reason: str) -> None:
        """Fail all calls: the queue has ended for good.

        Args:
            reason: Text of the ConnectionLostError that calls raise.
        """
        if not self._closed and self._pid == os.getpid() and self._io.alive:
            self._io.loop.call_soon_threadsafe(self._engine.give_up, reason)

    @property
    def ended(self) -> str:
        """Why the queue has ended for good; empty while it serves or may come back."""
        return "" if self._closed or self._pid != os.getpid() else self._engine.ended

    def close(self) -> None:
        """Close the connections. Idempotent; later calls raise NotInitializedError.

        It never fails: if storage does not answer within two seconds, it logs a warning and leaves the connections to
        the end of the process.
        """
        if not self._closed:
            self._closed = True
            if self._pid == os.getpid() and self._io.alive:
                try:
                    self._io.wait(self._engine.close(), timeout_s=_CLOSE_S)
                except TransferQueueError as error:
                    log.warning("client %s is closed, but some connections are not: %s", self.client_id, error)

    @property
    def engine(self) -> QueueEngine:
        """The engine that carries out the requests. Raises NotInitializedError after ``close``."""
        self._ready()
        return self._engine

    @property
    def rows(self) -> RowOperations:
        """Operations on rows by index, for ``run``. Raises NotInitializedError after ``close``."""
        self._ready()
        return self._rows

    @property
    def kv(self) -> KvOperations:
        """Operations on rows by key, for ``run``. Raises NotInitializedError after ``close``."""
        self._ready()
        return self._kv

    @property
    def metrics_endpoint(self) -> str | None:
        """``host:port`` where the controller serves ``/metrics``; None if it serves none."""
        self._ready()
        return self._engine.controller_attributes.get("metrics")

    @property
    def sampler(self) -> str:
        """Name of the sampler of the queue; empty if its controller does not tell."""
        self._ready()
        return str(self._engine.controller_attributes.get("sampler", ""))

    @property
    def default_lease(self) -> float:
        """Seconds of a fetch that names no lease; 0: the queue delivers at most once."""
        self._ready()
        return float(self._engine.controller_attributes.get("lease", 0.0))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    # -------------------------------------------------------------------------------------------------- rows by index

    async def async_get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        lease: float | None = None,
        token_budget: int | None = None,
        is_last: bool = False,
    ) -> BatchMeta:
        """Return metadata of rows: the next complete rows, all rows, or new rows, depending on ``mode``.

        Args:
            data_fields: The fields that the rows must have, and that ``get_data`` reads.
            batch_size: How many rows. With ``token_budget`` it may be left out.
            partition_id: The partition.
            mode: ``"fetch"``: exactly ``batch_size`` rows whose ``data_fields`` are all ready and which ``task_name``
                has not consumed; they count as consumed from now on. ``"force_fetch"``: all rows of the partition in
                any state; ``batch_size`` and ``task_name`` have no effect. ``"insert"``: ``batch_size`` new rows
                without data.
            task_name: The task that consumes the rows; required to fetch.
            sampling_config: Arguments of the queue's sampler.
            timeout: Seconds to wait for enough rows, 5 by default. With 0, or if the controller is in polling mode, the
                call returns an empty batch at once.
            lease: Seconds, or ``math.inf`` for no limit. Above 0 the rows are delivered at least once: they count as
                consumed when they are acknowledged (``async_ack``), and are delivered again if they are not
                acknowledged in time or this client dies. 0: at most once. None: the setting of the queue, at most once
                by default.
            token_budget: Tokens of the batch; a `TokenBudgetSampler` returns as many rows as fit.
            is_last: The rows that ``"insert"`` makes are the last ones of the partition.

        Returns:
            The rows, in the order of the sampler.

        Raises:
            WaitTimeoutError: Too few rows were ready in time, or the controller was not reached; the message says what
                was missing. The next call with the same arguments gets rows whose delivery was interrupted.
            RequestError: An unknown mode, a fetch without task, or an unknown partition of a forced one.
            SamplerError: The sampler raised, or returned invalid rows.
            InvalidTypeError, InvalidInputError: An argument is wrong.

        Example:
            >>> meta = await client.async_get_meta(["tokens"], 2, "train", task_name="update")
            >>> batch = await client.async_get_data(meta)
        """
        options = FetchOptions(batch_size, task_name, sampling_config, timeout, lease, token_budget)
        return await self.async_run(self.rows.get_meta, partition_id, data_fields, mode, options, is_last)

    async def async_put(
        self,
        data: TensorDict | dict[str, Any],
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        *,
        custom_meta: list[dict[str, Any]] | None = None,
        is_last: bool = False,
        placement: Literal["host", "device"] | None = None,
    ) -> BatchMeta:
        """Write rows: append them to a partition, or add fields to existing rows. All or nothing in a partition.

        Args:
            data: A TensorDict of batch size ``[rows]``, or a dict of tensors and lists of that length.
            metadata: The rows to write to, as many as ``data`` has; its ``custom_meta`` is merged into their tags.
                None: new rows of ``partition_id``.
            partition_id: The partition of new rows.
            data_parser: Gets ``{field: dense tensor or list of rows}`` and returns the same fields with as many rows.
            custom_meta: A dict for each row, merged into its tag when the rows become ready.
            is_last: The partition gets no rows after these: ``async_check_production_completed`` reports it, and
                streaming datasets end.
            placement: ``host`` or None: storage units of the host. ``device``: the fields stay on this process's GPU
                while it has room and this process lives; readers copy them from there. Refused without a CUDA device,
                with another backend than simple, or with several controllers.

        Returns:
            ``metadata`` with the written fields added and all rows ready, or without it the metadata of the new rows.

        Raises:
            CapacityError: There was no room in time.
            RequestError: ``metadata`` has another number of rows, or ``data_parser`` raised.
            InvalidInputError, InvalidTypeError: An argument is wrong; then nothing changed.

        Example:
            >>> rows = TensorDict({"tokens": torch.ones(2, 7, dtype=torch.int64)}, batch_size=[2])
            >>> meta = await client.async_put(rows, partition_id="train")
            >>> scores = TensorDict({"score": torch.tensor([0.5, 1.0])}, batch_size=[2])
            >>> meta = await client.async_put(scores, meta)
        """
        return await self.async_run(
            self.rows.put, data, metadata, partition_id, data_parser, custom_meta, is_last, placement
        )

    async def async_get_data(
        self,
        metadata: BatchMeta,
        *,
        zero_copy: bool = False,
        out: Out | None = None,
        device: Device = None,
        layout: Layout | None = None,
    ) -> TensorDict:
        """Return the fields of ``metadata`` for all its rows, in its order, as tensors that share no memory.

        Args:
            metadata: The result of ``async_get_meta`` or ``async_put``, or a part of it.
            zero_copy: Views of the stored rows where that is possible; see ``transfer_queue.kv_batch_get``.
            out: Tensors to fill; see there.
            device: Device of the tensors; see there.
            layout: ``"dense"``: uniform rows as one dense tensor. ``"jagged"``: fields of two or more dimensions as
                nested tensors. None: the layout of the client's settings, jagged by default.

        Returns:
            A TensorDict of batch size ``[rows]``, or an empty one of batch size ``[0]`` without rows or fields.

        Raises:
            StorageKeyNotFoundError: A row no longer exists.
            NotReadyError: A field is not written.
            DataLostError: Rows were lost with their storage unit.

        Example:
            >>> meta = await client.async_get_meta(["tokens"], partition_id="train", mode="force_fetch")
            >>> batch = await client.async_get_data(meta, layout="dense")
            >>> batch["tokens"].shape
            torch.Size([2, 7])
        """
        return await self.async_run(self.rows.get_data, metadata, ReadOptions(zero_copy, out, device, layout))

    async def async_ack(self, metadata: BatchMeta, task_name: str) -> None:
        """Acknowledge rows: ``task_name`` has consumed them, regardless of which client fetched them.

        Args:
            metadata: The rows. Rows that are gone, and rows that are acknowledged already or were fetched without a
                lease, are ignored.
            task_name: The task that fetched them.

        Raises:
            RequestError: The task has taken no rows of the partition. Nothing is acknowledged.
            InvalidTypeError: An argument is wrong.
        """
        await self.async_run(self.rows.acknowledge, metadata, task_name)

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge ``metadata.custom_meta`` shallowly into the tags of the rows.

        Args:
            metadata: The rows, of one partition or of several.

        Raises:
            StorageKeyNotFoundError: A row is gone.
            InvalidTypeError: A value is not plain.
        """
        await self.async_run(self.rows.set_custom_meta, metadata)

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Remove rows and free their storage.

        Args:
            metadata: The rows. Rows that are gone are ignored.

        Raises:
            InvalidTypeError: ``metadata`` is not a BatchMeta.
        """
        await self.async_run(self.rows.clear_samples, metadata)

    async def async_clear_partition(self, partition_id: str) -> None:
        """Remove a partition with all its rows.

        Args:
            partition_id: The partition. An unknown partition logs a warning.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        await self.async_run(self.rows.clear_partition, partition_id)

    async def async_get_production_status(self, data_fields: Sequence[str], partition_id: str) -> Status:
        """Return which fields of the rows of a partition are ready.

        The first call about an unknown partition or field logs a warning that names those that exist.

        Args:
            data_fields: The fields.
            partition_id: The partition.

        Returns:
            ``(indexes, produced)``: int64 ``(rows,)`` and int8 ``(rows, fields)``. Columns are in the order in which
            the partition got its fields. ``(None, None)`` for an unknown partition or field, or without fields.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.rows.production_status, data_fields, partition_id)

    async def async_get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """Return which rows of a partition a task has consumed.

        The first call about an unknown partition or task logs a warning that names those that exist.

        Args:
            task_name: The task. All rows count as not consumed by an unknown task.
            partition_id: The partition.

        Returns:
            ``(indexes, consumed)``: int64 and int8 ``(rows,)``. ``(None, None)`` for an unknown partition.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.rows.consumption_status, task_name, partition_id)

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Return whether fields are ready in all rows of a partition.

        Args:
            data_fields: The fields.
            partition_id: The partition.

        Returns:
            False also for an unknown or empty partition, and for an unknown field.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return _all(await self.async_get_production_status(data_fields, partition_id))

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Return whether a task has consumed all rows of a partition.

        Args:
            task_name: The task.
            partition_id: The partition.

        Returns:
            False also for an unknown or empty partition.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return _all(await self.async_get_consumption_status(task_name, partition_id))

    async def async_check_production_completed(self, partition_id: str) -> bool:
        """Return whether a put declared its rows the last ones of the partition (``is_last``) and all rows have data.

        Args:
            partition_id: The partition.

        Returns:
            False also for an unknown partition.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.rows.production_completed, partition_id)

    async def async_check_stream_drained(self, task_name: str, partition_id: str) -> bool:
        """Return whether production is completed and a task has consumed all rows.

        See ``async_check_production_completed``.

        Args:
            task_name: The task.
            partition_id: The partition.

        Returns:
            False also for an unknown partition.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.rows.stream_drained, task_name, partition_id)

    async def async_reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, idle: float = 0.0
    ) -> bool:
        """Make the rows of a partition fetchable again.

        The controller then keeps no state of a task without waiting fetches: call it for finished tasks.

        Args:
            partition_id: The partition.
            task_name: The task. None: every task.
            idle: Only tasks without a fetch for this many seconds, for example 3600 to drop the state of old runs. An
                acknowledgement, a restart of the controller and a load of a checkpoint count as a fetch. Tasks with a
                waiting fetch or with rows to acknowledge are not idle.

        Returns:
            Whether the partition and the task exist; the log names what exists if not.

        Raises:
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.rows.reset_consumption, partition_id, task_name, idle)

    async def async_get_partition_list(self) -> list[str]:
        """Return which partitions there are.

        Returns:
            Their names in the order of their creation.

        Raises:
            ConnectionLostError, WaitTimeoutError: The controller does not answer.
        """
        return await self.async_run(self.rows.partition_list)

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return metadata of the rows of ``keys``, with the fields that are ready in all of them.

        Args:
            keys: Keys of rows, or one key.
            partition_id: The partition.
            create: Make rows without data (status 0) for missing keys.

        Returns:
            The rows, in the order of ``keys``.

        Raises:
            KeyNotFoundError: Keys are not in the partition; the message names them. With the setting
                ``missing_fields: drop`` they are left out instead, and the log says how many, as in 0.1.x.
            InvalidTypeError, InvalidInputError: An argument is wrong.
        """
        return await self.async_run(self.kv.retrieve_meta, keys, partition_id, create)

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Return the keys of rows.

        Args:
            global_indexes: Indexes of rows, or one index.
            partition_id: The partition.

        Returns:
            The keys, in the order of ``global_indexes``.

        Raises:
            RequestError: A row has no key, or the partition is unknown.
            InvalidTypeError, InvalidInputError: An argument is wrong, for example an empty list.
        """
        return await self.async_run(self.kv.retrieve_keys, global_indexes, partition_id)

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the keys and tags of one partition, or of all partitions.

        Args:
            partition_id: The partition. None: all partitions.

        Returns:
            ``{partition: {key: tag}}``.

        Raises:
            InvalidTypeError: ``partition_id`` is not a string.
        """
        return await self.async_run(self.kv.list_keys, partition_id)


class Client(AsyncClient):
    """Adds a blocking method for each ``async_`` one. Inside a running event loop they work, and block it.

    The errors are the same as for `AsyncClient`.
    """

    get_meta = blocking(AsyncClient.async_get_meta)
    put = blocking(AsyncClient.async_put)
    get_data = blocking(AsyncClient.async_get_data)
    ack = blocking(AsyncClient.async_ack)
    set_custom_meta = blocking(AsyncClient.async_set_custom_meta)
    clear_samples = blocking(AsyncClient.async_clear_samples)
    clear_partition = blocking(AsyncClient.async_clear_partition)
    get_production_status = blocking(AsyncClient.async_get_production_status)
    get_consumption_status = blocking(AsyncClient.async_get_consumption_status)
    check_production_status = blocking(AsyncClient.async_check_production_status)
    check_consumption_status = blocking(AsyncClient.async_check_consumption_status)
    check_production_completed = blocking(AsyncClient.async_check_production_completed)
    check_stream_drained = blocking(AsyncClient.async_check_stream_drained)
    reset_consumption = blocking(AsyncClient.async_reset_consumption)
    get_partition_list = blocking(AsyncClient.async_get_partition_list)
    kv_retrieve_meta = blocking(AsyncClient.async_kv_retrieve_meta)
    kv_retrieve_keys = blocking(AsyncClient.async_kv_retrieve_keys)
    kv_list = blocking(AsyncClient.async_kv_list)
    run = blocking(AsyncClient.async_run)


def _tracer(options: ClientOptions) -> Tracer | None:
    if options.traces == "no":
        return None
    from transfer_queue.client.tracing import open_tracer

    return open_tracer(options)


def _all(status: Status) -> bool:
    return status[1] is not None and status[1].numel() > 0 and bool(status[1].all())


def _renew_lock_in_child() -> None:
    global _attaching
    _attaching = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)
