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
from typing import Any, TypeVar

from transfer_queue.errors import (
    ConnectionLostError,
    RequestError,
    StartError,
    TransferQueueError,
)
from transfer_queue.storage.base import Peer, Served, ServingStore, StoreContext, UnitStats
from transfer_queue.storage.ledger import Ledger
from transfer_queue.storage.yuanrong.worker import Worker, YuanrongSettings, block_key, open_worker, parse_settings
from transfer_queue.wire import messages as wire

__all__ = ["YuanrongStore", "open_store"]

T = TypeVar("T")
_WATCH_S = 1.0


class YuanrongStore(ServingStore):
    """See `ServingStore`."""

    def __init__(self, context: StoreContext, settings: YuanrongSettings) -> None:
        self._context = context
        self._settings = settings
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tq-yuanrong")
        self._ledger = Ledger(context.name, context.capacity)
        self._prefix = ""
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

    async def free(self, blocks: Sequence[int]) -> None:
        await self._delete(blocks)

    async def inventory(self) -> list[int]:
        return list(self._ledger.entries)

    def stats(self) -> UnitStats:
        return self._ledger.stats()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
            try:
                await self._delete(list(self._ledger.entries))
                await self._do(lambda: self._worker.delete([self._sentinel]))
            except TransferQueueError as error:
                self._context.log(f"blocks were left in the worker: {error}")
        self._executor.shutdown(wait=False)

    # ---------------------------------------------------------------------------------------------------- ServingStore

    def connected(self, peer: Peer) -> dict[str, Any]:
        self._ledger.connected(peer)
        return {}

    def disconnected(self, peer: Peer) -> list[int]:
        unsealed, orphans = self._ledger.disconnected(peer)
        self._delete_soon(unsealed)
        return orphans

    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        raise RequestError(f"{type(message).__name__} takes no payload")

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if isinstance(message, wire.Alloc):
            return self._ledger.alloc(peer, message)
        if isinstance(message, wire.Seal):
            self._ledger.seal(peer, message.block)
            return Served(wire.Stored(self.stats()))
        if isinstance(message, wire.Stats):
            return Served(wire.Stored(self.stats()))
        raise RequestError(f"{type(message).__name__} is not a request of a yuanrong storage unit")

    def notice(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.Abort) and message.block >> 32 == peer.writer:
            self._delete_soon([message.block])

    # ----------------------------------------------------------------------------------------------------- deleting

    def _delete_soon(self, blocks: list[int]) -> None:
        if blocks:
            task = asyncio.get_running_loop().create_task(self._delete(blocks))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, blocks: Sequence[int]) -> None:
        """Forget blocks at once; their space counts as free when the worker has deleted them."""
        removed = self._ledger.remove(blocks)
        keys = [block_key(self._prefix, number) for number in removed]
        try:
            if keys:
                await self._do(lambda: self._worker.delete(keys))
        except TransferQueueError as error:
            self._context.log(f"{len(keys)} blocks could not be deleted: {error}")
        finally:
            self._ledger.recycle(removed)

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
                self._ledger.recycle(self._ledger.remove(list(self._ledger.entries)))
                self._context.lost()

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)


async def open_store(context: StoreContext) -> YuanrongStore:
    """Raises ConfigError, StartError."""
    store = YuanrongStore(context, parse_settings(context.settings))
    await store.open()
    return store
