"""Blocks of one process in the memory of its GPU, behind a storage unit within that process."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from transfer_queue.columns.block import EncodedBlock
from transfer_queue.columns.device_memory import DeviceMemory
from transfer_queue.errors import CapacityError
from transfer_queue.storage.base import DEVICE, Peer, Served, StoreContext
from transfer_queue.storage.memory.arena import ArenaFile
from transfer_queue.storage.memory.extents import Extents
from transfer_queue.storage.memory.unit import MemoryStore, StoredBlock
from transfer_queue.wire import messages as wire

__all__ = ["DeviceStore"]

_ALIGN = 512


class _Owner:
    """The process itself as a writer of its unit."""

    client_id = "this process"
    writer = 0


class DeviceStore(MemoryStore):
    """As `MemoryStore`. Its file has the locks of readers only; the bytes of the blocks are in ``memory``.

    Readers that use the same GPU map the memory; others are sent copies.
    """

    def __init__(self, context: StoreContext, memory: DeviceMemory) -> None:
        super().__init__(context, ArenaFile(mmap.PAGESIZE, unnamed=True))
        self.unit = -1
        """Number of this unit at the controller; -1 before it is registered."""
        self._memory = memory
        self._extents = Extents(memory.nbytes, align=_ALIGN)
        self._owner = _Owner()
        super().connected(self._owner)

    def attributes(self) -> dict[str, Any]:
        return {DEVICE: self._memory.label}

    def registered(self, unit: int, run: str, shard: int = 0) -> None:
        self.unit = unit

    def connected(self, peer: Peer) -> dict[str, Any]:
        return {**super().connected(peer), DEVICE: self._memory.shared}

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if isinstance(message, wire.Put | wire.Alloc):
            raise CapacityError(f"{self._context.name} has no capacity for others: its process alone puts there")
        if isinstance(message, wire.MapDevice):
            return Served(wire.DeviceHandle(self._memory.export()))
        if isinstance(message, wire.Read):
            return self._read_copied(message)
        return super().serve(peer, message, payload)

    async def close(self) -> None:
        await super().close()
        self._memory.close()

    async def put(
        self, block: EncodedBlock, number: int, run_copy: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> int:
        """Store a block of this process; its size. Raises CapacityError at once if there is no room."""
        self._owner.writer = number >> 32
        stored = self._allocate(self._owner, number, block.nbytes, False)
        if stored is None:
            raise CapacityError(f"{self._context.name} has no capacity for {block.nbytes} bytes: {self._usage()}")
        stored.filling = True
        try:
            await run_copy(lambda: self._memory.write(block, stored.pieces[0][0]))
        except BaseException:
            stored.filling = False
            self._drop(number)
            raise
        self._filled(self._owner, number, stored)
        return block.nbytes

    async def _whole(self, block: StoredBlock) -> memoryview:
        return (await asyncio.get_running_loop().run_in_executor(None, self._views, block))[0]

    def _views(self, block: StoredBlock) -> list[memoryview]:
        return [self._memory.read(offset, nbytes).data for offset, nbytes in block.pieces]
