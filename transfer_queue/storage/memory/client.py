"""Client side of the memory backend: shared memory on the unit's host, TCP elsewhere."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.recycling import empty_bytes
from transfer_queue.errors import ConnectionLostError, RequestError, TransferQueueError
from transfer_queue.storage.attempts import Attempts
from transfer_queue.storage.base import (
    DEVICE,
    Backend,
    BackendContext,
    BlockRead,
    Capabilities,
    Channel,
    Fetched,
    FetchedBlock,
    UnitInfo,
)
from transfer_queue.storage.memory.arena import attach_arena, populate
from transfer_queue.storage.memory.liveness import take_lock
from transfer_queue.storage.memory.shared_table import SharedBlockTable
from transfer_queue.wire.messages import Abort, Alloc, Fill, MapDevice, Open, Put, Read, ReadPart, Release, Seal

__all__ = ["INLINE_BYTES", "MemoryBackend", "open_backend"]

log = logging.getLogger(__name__)

INLINE_BYTES = 64 << 10
"""Blocks up to this size travel within the Put message."""
_THREAD_BYTES = 512 << 10
"""Copies from this size on go to the worker thread; shorter ones cost less than the change of thread."""
_POPULATE_BYTES = 2 << 20
"""Of a mapped arena, entered into the page tables at a time."""
_ANSWER_S = 30.0
_SLOWEST_BYTES_PER_S = 10e6
"""A transfer may take as long as this rate needs; a dead peer is noticed by heartbeat much earlier."""
_MOST_SMALL = 64
"""Most blocks of a read that may be small."""
_AFTER_LARGE = 16
"""Reads after a large one that count as large without asking."""
_CLOSED = "this client of the storage units is closed"
_NO_BUFFER = memoryview(b"")
_NO_BUFFER.release()


class _Mapping:
    """A unit's arena mapped into this process."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        """Raises OSError if the file is not there, ValueError if it is not the unit's own."""
        descriptor = os.open(attributes["path"], os.O_RDWR | os.O_CLOEXEC)
        try:
            take_lock(descriptor, attributes["lock"])
            mapped = attach_arena(attributes["path"], attributes["size"], attributes["nonce"])
            if mapped is None:
                raise ValueError("another file of the same name")
        except BaseException:
            os.close(descriptor)
            raise
        self._map: mmap.mmap | None = mapped
        # Views that users hold keep the map, and with it the lock that protects what they look at.
        self._lock = weakref.finalize(mapped, os.close, descriptor)
        self._lock.atexit = False
        self.buffer = memoryview(mapped)
        table = attributes.get("table")
        self._table = None if table is None else SharedBlockTable(self.buffer[table:])
        self._populated = bytearray(-(-len(mapped) // _POPULATE_BYTES))  # 1 for each part that is

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Raises ConnectionLostError if the unit went away meanwhile."""
        try:
            return self.buffer[offset : offset + nbytes]
        except ValueError:
            raise ConnectionLostError("the storage unit went away") from None

    def copies(self, blocks: Sequence[int]) -> list[BlockView] | None:
        """Copies of blocks that are small; None if any of them is not, or is gone. Safe in any thread."""
        if (table := self._table) is None:
            return None
        found: list[BlockView] = []
        try:
            for block in blocks:
                if (place := table.find(block)) is None:
                    return None
                copy = np.frombuffer(self.buffer, np.uint8, place[1], place[0]).copy()
                if table.find(block) != place:  # the memory may have been used again meanwhile
                    return None
                found.append(BlockView(copy))
        except ValueError:  # unmapped meanwhile
            return None
        return found

    def populate(self, offset: int, nbytes: int) -> None:
        """Make ready for a first copy into this part, which it is only once."""
        first, end = offset // _POPULATE_BYTES, -(-(offset + nbytes) // _POPULATE_BYTES)
        if (first := self._populated.find(0, first, end)) < 0:
            return
        end = self._populated.rfind(0, first, end) + 1
        populate(self.view(first * _POPULATE_BYTES, (end - first) * _POPULATE_BYTES))
        self._populated[first:end] = b"\1" * (end - first)

    def close(self) -> None:
        """Map and lock go at once, or with the last view that is in use and the copy that is under way in a thread."""
        table, self._table = self._table, None
        mapped, self._map = self._map, None
        buffer, self.buffer = self.buffer, _NO_BUFFER
        if mapped is None:
            return
        with suppress(BufferError):
            if table is not None:
                table.release()
            buffer.release()
            mapped.close()
            self.unlock()

    def unlock(self) -> None:
        """Let go of the lock that says that this process may touch the arena."""
        self._lock()


class _Link:
    """A unit as this client reaches it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.mapping: _Mapping | None = None
        with suppress(OSError, ValueError, KeyError):
            self.mapping = _Mapping(channel.welcome.attributes)
        self._shared = channel.welcome.attributes.get(DEVICE)
        self._device: Any = None
        self._mapping_device = asyncio.Lock()

    def close(self) -> None:
        self.channel.close()
        self._device = None
        if self.mapping is not None:
            self.mapping.close()

    @property
    def on_device(self) -> bool:
        """Whether the unit's blocks lie on a GPU of this host."""
        return self.mapping is not None and self._shared is not None

    @property
    def is_mapped(self) -> bool:
        """Whether this process has mapped the memory of the GPU."""
        return self._device is not None

    async def map_device(self, run_copy: Callable[[Callable[[], Any]], Awaitable[Any]], timeout_s: float) -> bool:
        """Whether this process reads blocks of the GPU where they lie; maps its memory once.

        Raises ConnectionLostError, WaitTimeoutError.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        async with self._mapping_device:
            if self._device is None and self._shared is not None:
                self._device = await self._mapped_device(run_copy, timeout_s)
        return self._device is not None

    async def _mapped_device(self, run_copy: Callable[[Callable[[], Any]], Awaitable[Any]], timeout_s: float) -> Any:
        from transfer_queue.columns import device_memory as memory

        shared = memory.Shared(*self._shared)
        own = memory.own_memory(shared)
        number = memory.device_number(shared)
        if own is not None or number is None:
            return own
        # Each handle keeps the writer's memory until it is mapped and unmapped, or released.
        reply, _ = await self.channel.request(
            MapDevice(), timeout_s=timeout_s, late=lambda reply: memory.release_handle(reply.handle)
        )
        try:
            if reply.handle:
                return await run_copy(lambda: memory.map_handle(reply.handle, number, shared.nbytes))
        except RuntimeError as error:
            log.warning("blocks of %s on its GPU are sent, as CUDA does not map them: %s", self.channel, error)
        self._shared = self.mapping = None
        return None

    def views(self, extents: Sequence[tuple[int, int]]) -> list[BlockView]:
        """Blocks in place. Waits some 10 us for the head of each that is on a GPU."""
        assert self.mapping is not None
        if self._shared is None:
            return [BlockView(self.mapping.view(*extent)) for extent in extents]
        from transfer_queue.columns.device_memory import DeviceBlockView

        memory = self._device
        if memory is None:
            raise ConnectionLostError("the process with the GPU went away")
        return [DeviceBlockView(memory[offset : offset + nbytes]) for offset, nbytes in extents]


class _Fetched(Fetched):
    def __init__(self, loop: asyncio.AbstractEventLoop | None, count: int) -> None:
        """``loop``: where leases are given back; None: there are none."""
        self.blocks: list[FetchedBlock] = [None] * count  # type: ignore[list-item]
        self.is_own = True
        self._loop = loop
        self._leases: list[tuple[Channel, int]] = []

    def add_lease(self, channel: Channel, lease: int) -> None:
        self._leases.append((channel, lease))

    def release(self) -> None:
        leases, self._leases = self._leases, []
        if leases and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the leases with it
                self._loop.call_soon_threadsafe(_release, leases)


def _release(leases: list[tuple[Channel, int]]) -> None:
    for channel, lease in leases:
        channel.send(Release(lease))


class MemoryBackend(Backend):
    """See ``storage.base.Backend``."""

    name = "simple"
    capabilities = Capabilities(tracks_writers=True, reports_capacity=True)

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._use_shared_memory = bool(context.settings.get("sharedMemory", True))
        self._links: dict[int, _Link] = {}
        self._opening = Attempts[_Link]()
        self._closed = False
        self._large_reads = 0

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        link = await self._link(unit)
        nbytes = block.nbytes
        scope = self._context.scopes.get(block_id, "")
        timeout_s = wait_s + _ANSWER_S + nbytes / _SLOWEST_BYTES_PER_S
        allocated = False
        try:
            if nbytes <= INLINE_BYTES:
                await link.channel.request(Put(block_id, wait_s, scope), block.segments(), timeout_s=timeout_s)
                return nbytes
            alloc = Alloc(block_id, nbytes, wait_s, scope, pieces=True)
            extent, _ = await link.channel.request(alloc, timeout_s=timeout_s)
            allocated = True
            if link.mapping is None or extent.offset < 0:
                await link.channel.request(Fill(block_id), block.segments(), timeout_s=timeout_s)
            else:
                await self._copy_in(block, link.mapping, extent.offset)
                await link.channel.request(Seal(block_id), timeout_s=timeout_s)
        except (TransferQueueError, asyncio.CancelledError) as error:
            if allocated or not isinstance(error, RequestError):  # refused: what is there was another put's
                link.channel.send(Abort(block_id))
            raise
        return nbytes

    async def _copy_in(self, block: EncodedBlock, mapping: _Mapping, offset: int) -> None:
        target = mapping.view(offset, block.nbytes)
        if block.nbytes < _THREAD_BYTES:
            block.write_into(target)
            return

        def copy() -> None:
            mapping.populate(offset, block.nbytes)
            block.write_into(target)

        await self._context.run_copy(copy)

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        fetched = _Fetched(asyncio.get_running_loop(), len(reads))
        by_unit: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_unit.setdefault(read.unit.unit, []).append(position)
        work = [self._get_from(reads, positions, fetched, timeout_s) for positions in by_unit.values()]
        try:
            if len(work) == 1:
                await work[0]
            else:
                results = await asyncio.gather(*work, return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
        except BaseException:
            fetched.release()
            raise
        return fetched

    async def _get_from(
        self, reads: Sequence[BlockRead], positions: list[int], fetched: _Fetched, timeout_s: float
    ) -> None:
        link = await self._link(reads[positions[0]].unit)
        channel = link.channel
        run_copy, on_device = self._context.run_copy, link.on_device
        if link.mapping is not None and (not on_device or link.is_mapped or await link.map_device(run_copy, timeout_s)):
            if (copies := _small(link, reads, positions)) is not None:
                _take_copies(fetched, reads, positions, copies)
                return
            fetched.is_own = False
            opened, payload = await channel.request(
                Open([reads[position].block for position in positions]),
                timeout_s=timeout_s,
                late=lambda opened: channel.send(Release(opened.lease)),
            )
            if opened.lease:
                fetched.add_lease(channel, opened.lease)
            if not opened.lease and payload is not None:
                views = [BlockView(payload[offset : offset + nbytes]) for offset, nbytes in opened.extents]
            else:
                views = link.views(opened.extents)
            for position, view in zip(positions, views, strict=True):
                fetched.blocks[position] = FetchedBlock(view, reads[position].rows)
            return
        reply, payload = await channel.request(
            Read([_part(reads[position]) for position in positions]),
            timeout_s=timeout_s,
            into=lambda nbytes: empty_bytes(nbytes).data,
        )
        _take_parts(fetched, positions, reply.sizes, payload, reads[positions[0]].unit)

    def may_be_small(self, reads: Sequence[BlockRead]) -> bool:
        """Whether `read_small` is worth trying. Safe in any thread, as that is."""
        self._large_reads -= self._large_reads > 0
        return len(reads) <= _MOST_SMALL and not self._large_reads

    def read_small(
        self, reads: Sequence[BlockRead], ask: Callable[[UnitInfo, Any], tuple[Any, Any, memoryview | None]]
    ) -> Fetched | None:
        """Read small blocks in the calling thread; ``ask`` gives (connection, reply, payload). None: use ``get``.

        Raises what ``ask`` raises.
        """
        fetched = _Fetched(None, len(reads))
        by_unit: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_unit.setdefault(read.unit.unit, []).append(position)
        for number, positions in by_unit.items():
            info, link = reads[positions[0]].unit, self._links.get(number)
            if link is None or link.channel.closed or link.on_device or self._closed:
                return None
            if link.mapping is None:
                _, reply, payload = ask(info, Read([_part(reads[position]) for position in positions]))
                _take_parts(fetched, positions, reply.sizes, payload, info)
                continue
            if (copies := link.mapping.copies([reads[position].block for position in positions])) is not None:
                _take_copies(fetched, reads, positions, copies)
                continue
            connection, opened, payload = ask(info, Open([reads[position].block for position in positions]))
            if opened.lease or payload is None:
                connection.send(Release(opened.lease))
                self._large_reads = _AFTER_LARGE
                return None
            for position, (offset, nbytes) in zip(positions, opened.extents, strict=True):
                view = BlockView(payload[offset : offset + nbytes])
                fetched.blocks[position] = FetchedBlock(view, reads[position].rows)
        return fetched

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        link = self._links.get(unit.unit)
        if link is not None:
            link.channel.send(Abort(block_id))

    async def close(self) -> None:
        self._closed = True
        self._opening.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def abandon_in_child(self) -> None:
        """After a fork: let go of what the parent's connections hold, without a word to the units."""
        for link in self._links.values():
            if link.mapping is not None:
                link.mapping.close()
                link.mapping.unlock()

    def release_lost(self) -> None:
        """Let go of the memory of units that went away: they recycle nothing that somebody may still touch."""
        lost = [number for number, link in self._links.items() if link.channel.closed]
        for number in lost:
            self._links.pop(number).close()

    async def _link(self, unit: UnitInfo) -> _Link:
        if self._closed:
            raise ConnectionLostError(_CLOSED)
        link = self._links.get(unit.unit)
        if link is not None and not link.channel.closed:
            return link
        return await self._opening.join(unit.unit, lambda: self._open(unit))

    async def _open(self, unit: UnitInfo) -> _Link:
        if (former := self._links.pop(unit.unit, None)) is not None:
            former.close()
        link = _Link(await self._context.connect(unit.address))
        if self._closed:  # meanwhile
            link.close()
            raise ConnectionLostError(_CLOSED)
        if not self._use_shared_memory and link.mapping is not None:
            link.mapping.close()
            link.mapping = None
        self._links[unit.unit] = link
        return link


def _small(link: _Link, reads: Sequence[BlockRead], positions: list[int]) -> list[BlockView] | None:
    if link.mapping is None or link.on_device or len(positions) > _MOST_SMALL:
        return None
    return link.mapping.copies([reads[position].block for position in positions])


def _take_copies(fetched: _Fetched, reads: Sequence[BlockRead], positions: list[int], copies: list[BlockView]) -> None:
    for position, view in zip(positions, copies, strict=True):
        fetched.blocks[position] = FetchedBlock(view, reads[position].rows)


def _take_parts(
    fetched: _Fetched, positions: list[int], sizes: Sequence[int], payload: memoryview | None, unit: UnitInfo
) -> None:
    """Take the blocks of the answer to a Read."""
    offset = 0
    for position, nbytes in zip(positions, sizes, strict=True):
        if payload is None:
            raise ConnectionLostError(f"storage unit {unit.name} sent no data")
        fetched.blocks[position] = FetchedBlock(BlockView(payload[offset : offset + nbytes]), None)
        offset += nbytes


def _part(read: BlockRead) -> ReadPart:
    rows = read.rows
    return ReadPart(read.block, read.fields, rows if rows is None or isinstance(rows, tuple) else _i32(rows))


def _i32(rows: Any) -> bytes:
    return np.asarray(rows, dtype="<i4").tobytes()


async def open_backend(context: BackendContext) -> MemoryBackend:
    return MemoryBackend(context)
