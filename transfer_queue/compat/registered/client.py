"""Client side: blocks go to the user's manager as rows of one field; the storage unit grants space and keeps notes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.column import Bytes
from transfer_queue.compat.registered.registry import StorageManager, StorageManagerFactory
from transfer_queue.compat.registered.unit import MAX_NOTE_BYTES
from transfer_queue.compat.server_info import Role, server_info
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import (
    ConnectionLostError,
    CorruptBlockError,
    RequestError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.metadata import BatchMeta, describe_fields
from transfer_queue.storage.base import (
    Backend,
    BackendContext,
    BlockRead,
    Capabilities,
    Channel,
    Fetched,
    FetchedBlock,
    UnitInfo,
)
from transfer_queue.wire.messages import Abort, Alloc, Fill, Read, ReadPart, Sweep

__all__ = ["RegisteredBackend", "open_backend"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_ANSWER_S = 30.0
_SWEEP_S = 30.0
_LAST_SWEEP_S = 1.0


class _Note(msgspec.Struct, array_like=True):
    """A unit's note of a block: its size, and the manager's metadata."""

    nbytes: int
    meta: Any = None


class _Row(NamedTuple):
    block: int
    note: _Note


_encode_note = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(_Note).decode


class _Fetched(Fetched):
    """Values that the manager gave; the views keep them."""

    def __init__(self, blocks: list[FetchedBlock]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        pass


class _Manager:
    """The user's manager, on an event loop and in a thread of its own: what blocks in it blocks nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._manager: StorageManager
        self._notified: dict[int, dict[str, Any]] = {}

    async def open(self, make: Callable[[], StorageManager]) -> None:
        """Raises what ``make`` raises of the library's; RequestError for anything else."""
        threading.Thread(target=self._run, name="tq-manager", daemon=True).start()

        async def made() -> None:
            self._manager = make()
            self._manager.on_stored = self._stored

        try:
            await self._do("be made", made())
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    async def put(self, field: str, block: int, data: bytearray) -> Any:
        """Returns what is to be given back with the row."""
        import torch
        from tensordict import TensorDict

        async def work() -> Any:
            metadata = _metadata(field, [_Row(block, _Note(len(data)))])
            value = torch.frombuffer(data, dtype=torch.uint8).unsqueeze(0)
            await self._manager.put_data(TensorDict({field: value}, batch_size=[1]), metadata)
            notified = self._notified.pop(block, {})
            return metadata._custom_backend_meta[0].get(field, notified.get(field))

        return await self._do(f"store block {block:#x}", work())

    async def get(self, field: str, rows: Sequence[_Row]) -> list[Bytes]:
        """Raises StorageKeyNotFoundError for what the manager does not have, CorruptBlockError for other bytes."""

        async def work() -> list[Bytes]:
            try:
                found = await self._manager.get_data(_metadata(field, rows))
                column = found.get(field)
            except KeyError as error:
                raise StorageKeyNotFoundError(f"storage manager {self._name!r} has lost {error}") from error
            values = list(column.unbind(0)) if hasattr(column, "unbind") else list(column)
            return [self._checked(value, row) for value, row in zip(values, rows, strict=True)]

        return await self._do(f"read {len(rows)} blocks", work())

    async def clear(self, field: str, row: _Row) -> None:
        async def work() -> None:
            with suppress(KeyError):  # of a put that was given up before it came here
                await self._manager.clear_data(_metadata(field, [row]))

        await self._do(f"remove block {row.block:#x}", work())

    async def close(self) -> None:
        async def work() -> None:
            self._manager.close()

        try:
            await self._do("be closed", work())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _stored(self, metas: dict[int, dict[str, Any]]) -> None:
        self._notified.update(metas)

    def _checked(self, value: Any, row: _Row) -> Bytes:
        if value is None:
            raise StorageKeyNotFoundError(f"storage manager {self._name!r} has lost block {row.block:#x}")
        value = getattr(value, "data", value) if not hasattr(value, "numpy") else value.detach().cpu().numpy()
        data: Bytes = np.frombuffer(value, np.uint8)
        if data.nbytes != row.note.nbytes:
            raise CorruptBlockError(
                f"storage manager {self._name!r} gave {data.nbytes} bytes for block {row.block:#x}, which has "
                f"{row.note.nbytes}"
            )
        return data

    async def _do(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        with _named(f"storage manager {self._name!r} could not {what}"):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def _metadata(field: str, rows: Sequence[_Row]) -> BatchMeta:
    """Blocks as rows: of one field, a row of as many bytes as the block has."""
    sizes = np.asarray([row.note.nbytes for row in rows], "<i4")
    if len(rows) == 1:
        schema = describe_fields([FieldSchema(field, "dense", "uint8", (int(sizes[0]),))], 1)
    else:
        ragged = FieldSchema(field, "ragged", "uint8", (None,))
        schema = describe_fields([ragged], len(rows), {field: sizes.tobytes()})
    return BatchMeta(
        [row.block for row in rows],
        ["blocks"] * len(rows),
        schema,
        np.ones(len(rows), np.int8),
        _custom_backend_meta=[{} if row.note.meta is None else {field: row.note.meta} for row in rows],
    )


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except TransferQueueError:
        raise
    except Exception as error:  # boundary of a user's class
        raise RequestError(f"{what}: {type(error).__name__}: {error}") from error


class RegisteredBackend(Backend):
    """See ``storage.base.Backend``."""

    name = "registered"
    capabilities = Capabilities(tracks_writers=True, reports_capacity=True, max_block_bytes=256 << 20)

    def __init__(self, context: BackendContext, manager: _Manager) -> None:
        self._context = context
        self._manager = manager
        self._channels: dict[int, Channel] = {}
        self._sweeps: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._closed = False

    @property
    def _field(self) -> str:
        """Name of the field. It differs in each run of the queue, since block numbers restart."""
        return f"block-{self._context.run}"

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        channel = await self._channel(unit)
        granted = False
        try:
            scope = self._context.scopes.get(block_id, "")
            await channel.request(Alloc(block_id, block.nbytes, wait_s, scope), timeout_s=wait_s + _ANSWER_S)
            granted = True
            data = await self._context.run_copy(block.to_bytes)
            note = _encoded(_Note(block.nbytes, await self._manager.put(self._field, block_id, data)))
            await channel.request(Fill(block_id), [note], timeout_s=_ANSWER_S)
        except (TransferQueueError, asyncio.CancelledError) as error:
            if granted or not isinstance(error, RequestError):  # refused: what is there was another put's
                channel.send(Abort(block_id))
            raise
        return block.nbytes

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        try:
            return await asyncio.wait_for(self._get(reads, timeout_s), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise WaitTimeoutError(f"{len(reads)} blocks were not read within {timeout_s:g} s") from None

    async def _get(self, reads: Sequence[BlockRead], timeout_s: float) -> _Fetched:
        units = {read.unit.unit: read.unit for read in reads}
        wanted: dict[int, _Note] = {}
        for number, unit in units.items():
            blocks = list(dict.fromkeys(read.block for read in reads if read.unit.unit == number))
            channel = await self._channel(unit)
            reply, payload = await channel.request(Read([ReadPart(block) for block in blocks]), timeout_s=timeout_s)
            wanted.update(zip(blocks, _notes(reply.sizes, payload), strict=True))
        rows = [_Row(*item) for item in wanted.items()]
        values = await self._manager.get(self._field, rows) if rows else []
        views = {row.block: BlockView(value) for row, value in zip(rows, values, strict=True)}
        return _Fetched([FetchedBlock(views[read.block], read.rows) for read in reads])

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        channel = self._channels.get(unit.unit)
        if channel is not None:
            channel.send(Abort(block_id))

    def renew(self, context: BackendContext) -> bool:
        """Go on in another session. The manager stays: its store may lie in this process."""
        if context.settings != self._context.settings:
            return False
        self._context = context
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
        return True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._sweeps:
            task.cancel()
        for channel in self._channels.values():
            with suppress(ConnectionLostError, WaitTimeoutError):  # others remove them
                await self._sweep_once(channel, [], 0.0, _LAST_SWEEP_S)
            channel.close()
        await self._manager.close()

    async def _channel(self, unit: UnitInfo) -> Channel:
        self._check_open()
        channel = self._channels.get(unit.unit)
        if channel is None or channel.closed:
            async with self._opening:
                channel = self._channels.get(unit.unit)
                while channel is None or channel.closed:
                    channel = await self._connect(unit)
        return channel

    async def _connect(self, unit: UnitInfo) -> Channel:
        context = self._context
        channel = await context.connect(unit.address)
        if self._closed or context is not self._context:  # meanwhile
            channel.close()
            self._check_open()
            return channel
        self._channels[unit.unit] = channel
        task = asyncio.get_running_loop().create_task(self._sweep(channel))
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)
        return channel

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("this client of the storage units is closed")

    # ------------------------------------------------------------------------------------------------- dead blocks

    async def _sweep(self, channel: Channel) -> None:
        """Remove what the unit asks to be removed, as long as the connection lasts."""
        removed: list[int] = []
        with suppress(ConnectionLostError):
            while not channel.closed:
                with suppress(WaitTimeoutError):
                    removed = await self._sweep_once(channel, removed, _SWEEP_S, _SWEEP_S + _ANSWER_S)

    async def _sweep_once(self, channel: Channel, removed: list[int], wait_s: float, timeout_s: float) -> list[int]:
        """Say what was removed, and remove what else is dead."""
        done = np.asarray(removed, "<i8").tobytes()
        reply, payload = await channel.request(Sweep(done, wait_s), timeout_s=timeout_s)
        blocks = np.frombuffer(reply.blocks, "<i8").tolist()
        cleared = []
        for row in map(_Row, blocks, _notes(reply.sizes, payload)):
            try:
                await self._manager.clear(self._field, row)
            except TransferQueueError as error:
                log.warning("%s; it stays in the store until that is tried again", error)
            else:
                cleared.append(row.block)
        return cleared


def _encoded(note: _Note) -> bytes:
    try:
        encoded = _encode_note(note)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"what a storage client returns for a key must be plain values: {error}") from None
    if len(encoded) > MAX_NOTE_BYTES:
        raise RequestError(f"what a storage client returns for a key has {len(encoded)} bytes, over {MAX_NOTE_BYTES}")
    return encoded


def _notes(sizes: Sequence[int], payload: memoryview | None) -> list[_Note]:
    notes = []
    start = 0
    for size in sizes:
        notes.append(_decode_note(payload[start : start + size]) if size and payload is not None else _Note(0))
        start += size
    return notes


async def open_backend(context: BackendContext) -> RegisteredBackend:
    """Raises ConfigError in a process that has not registered the manager."""
    name, section = context.settings["manager"], context.settings["section"]
    controller = server_info(Role.CONTROLLER, "TransferQueueController", context.controller)
    manager = _Manager(name)
    await manager.open(lambda: StorageManagerFactory.create(name, controller, dict(section)))
    return RegisteredBackend(context, manager)
