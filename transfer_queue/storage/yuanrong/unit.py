"""Unit side: an account of the blocks in one worker. The worker keeps the bytes and knows no limits, lists or owners.

Clients ask the unit for space before they store, and tell it when they are done; so it knows what is there, whose it is
and when it has to be deleted. A key of the unit's own, the sentinel, tells whether the worker still has what it held.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    RequestError,
    StartError,
    StorageKeyNotFoundError,
    TransferQueueError,
)
from transfer_queue.storage.base import Peer, Served, StoreContext, UnitStats
from transfer_queue.storage.yuanrong.worker import Worker, YuanrongSettings, block_key, open_worker, parse_settings
from transfer_queue.wire import messages as wire

__all__ = ["YuanrongStore", "open_store"]

T = TypeVar("T")
_WATCH_S = 1.0


@dataclass(eq=False)
class _Entry:
    nbytes: int
    writer: Peer
    sealed: bool = False


class YuanrongStore:
    """See ``storage.base.UnitStore`` and ``ClientServing``."""

    def __init__(self, context: StoreContext, settings: YuanrongSettings) -> None:
        self._context = context
        self._settings = settings
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tq-yuanrong")
        self._entries: dict[int, _Entry] = {}
        self._used = 0
        self._writers: dict[int, int] = {}
        self._prefix = ""
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._reachable = True
        self._deleting: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._worker: Worker

    async def open(self) -> None:
        """Raises StartError."""
        try:
            await self._do(self._connect)
        except ConnectionLostError as error:
            raise StartError(str(error)) from error
        self._watching = asyncio.create_task(self._watch())

    # ---------------------------------------------------------------------------------------------------- UnitStore

    def attributes(self) -> dict[str, Any]:
        return {"worker": self._settings.worker, "prefix": self._prefix}

    def registered(self, unit: int, run: str) -> None:
        pass

    async def free(self, blocks: Sequence[int]) -> None:
        await self._delete([number for number in blocks if number in self._entries])

    async def inventory(self) -> list[int]:
        return list(self._entries)

    def stats(self) -> UnitStats:
        return UnitStats(self._context.capacity, self._used, len(self._entries))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
            try:
                await self._delete(list(self._entries))
                await self._do(lambda: self._worker.delete([self._sentinel]))
            except TransferQueueError as error:
                self._context.log(f"blocks were left in the worker: {error}")
        self._executor.shutdown(wait=False)

    # ------------------------------------------------------------------------------------------------ ClientServing

    def connected(self, peer: Peer) -> dict[str, Any]:
        self._writers[peer.writer] = self._writers.get(peer.writer, 0) + 1
        return {}

    def disconnected(self, peer: Peer) -> list[int]:
        self._delete_soon([number for number, each in self._entries.items() if each.writer is peer and not each.sealed])
        self._writers[peer.writer] -= 1
        if self._writers[peer.writer]:
            return []
        del self._writers[peer.writer]
        return [number for number in self._entries if number >> 32 == peer.writer]

    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        raise RequestError(f"{type(message).__name__} takes no payload")

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if isinstance(message, wire.Alloc):
            return self._alloc(peer, message)
        if isinstance(message, wire.Seal):
            return self._seal(peer, message)
        if isinstance(message, wire.Stats):
            return Served(wire.Stored(self.stats()))
        raise RequestError(f"{type(message).__name__} is not a request of a yuanrong storage unit")

    def notice(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.Abort) and message.block >> 32 == peer.writer and message.block in self._entries:
            self._delete_soon([message.block])

    async def _alloc(self, peer: Peer, message: wire.Alloc) -> Served:
        if message.block in self._entries or message.block >> 32 != peer.writer:
            raise RequestError(f"block {message.block:#x} exists already, or belongs to another writer")
        capacity, problem = self._context.capacity, f"no capacity for {message.nbytes} bytes on {self._context.name}"
        if message.nbytes > capacity:
            raise CapacityError(f"{problem}: it has {capacity}; put smaller batches")
        deadline = asyncio.get_running_loop().time() + message.wait_s
        async with self._turn:  # first come, first served: small blocks may not starve a large one
            while self._used + message.nbytes > capacity:
                left = deadline - asyncio.get_running_loop().time()
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), max(0.0, left))
                except (TimeoutError, asyncio.TimeoutError):
                    raise CapacityError(
                        f"{problem}: {self._used} of {capacity} are used and none became free within "
                        f"{message.wait_s:g} s; clear consumed rows or add storage"
                    ) from None
            if message.block in self._entries or peer.writer not in self._writers:
                raise RequestError(f"block {message.block:#x} exists already, or its writer is gone")
            self._entries[message.block] = _Entry(message.nbytes, peer)
            self._used += message.nbytes
        return Served(wire.Extent(0))

    def _seal(self, peer: Peer, message: wire.Seal) -> Served:
        entry = self._entries.get(message.block)
        if entry is None or entry.writer is not peer:
            raise StorageKeyNotFoundError(f"block {message.block:#x} is not being written over this connection")
        entry.sealed = True
        return Served(wire.Stored(self.stats()))

    # ----------------------------------------------------------------------------------------------------- deleting

    def _delete_soon(self, blocks: list[int]) -> None:
        if blocks:
            task = asyncio.get_running_loop().create_task(self._delete(blocks))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, blocks: list[int]) -> None:
        """Forget blocks at once; their space counts as free when the worker has deleted them."""
        entries = [self._entries.pop(number) for number in blocks if number in self._entries]
        keys = [block_key(self._prefix, number) for number in blocks]
        try:
            if keys:
                await self._do(lambda: self._worker.delete(keys))
        except TransferQueueError as error:
            self._context.log(f"{len(keys)} blocks could not be deleted: {error}")
        finally:
            self._used -= sum(entry.nbytes for entry in entries)
            self._freed.set()

    # -------------------------------------------------------------------------------------------------------- watch

    @property
    def _sentinel(self) -> str:
        return f"{self._prefix}:unit"

    def _connect(self) -> None:
        """On the unit's one thread: begin a new life in the worker."""
        self._reconnect()
        self._prefix = f"tq-{secrets.token_hex(8)}"
        self._worker.put(self._sentinel, b"1")

    def _reconnect(self) -> None:
        self._worker = open_worker(self._settings.worker, self._settings)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                there = await self._do(lambda: self._worker.exists(self._sentinel))
                if not there:
                    await self._do(self._connect)
            except TransferQueueError as error:
                if self._reachable:
                    self._context.log(str(error))
                self._reachable = False
                with suppress(StartError):  # said already
                    await self._do(self._reconnect)
                continue
            self._reachable = True
            if not there:
                self._context.log("the data system lost this unit's blocks: its worker was restarted")
                self._entries.clear()
                self._used = 0
                self._freed.set()
                self._context.lost()

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)


async def open_store(context: StoreContext) -> YuanrongStore:
    """Raises ConfigError, StartError."""
    store = YuanrongStore(context, parse_settings(context.settings))
    await store.open()
    return store
