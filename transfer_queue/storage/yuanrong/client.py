"""Client side: bytes go between batches and the shared memory of workers; space is granted by the storage units."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.errors import ConnectionLostError, RequestError, StartError, TransferQueueError, WaitTimeoutError
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
from transfer_queue.storage.yuanrong.worker import (
    Worker,
    YuanrongSettings,
    block_key,
    open_worker,
    parse_settings,
)
from transfer_queue.wire.messages import Abort, Alloc, Seal

__all__ = ["YuanrongBackend", "open_backend"]

_ANSWER_S = 30.0
_DROP_S = 0.1
"""The data system's client of a worker that is gone takes a whole request's time to end, and holds the interpreter
meanwhile. So it is let go only at the end, and after those who wait for that have gone on."""


class _Fetched(Fetched):
    """Views over buffers of the data system, which keeps their memory as long as they are held."""

    def __init__(self, blocks: list[FetchedBlock], buffers: list[Any]) -> None:
        self.blocks = blocks
        self._buffers = buffers

    def release(self) -> None:
        self._buffers = []


class YuanrongBackend(Backend):
    """See ``storage.base.Backend``."""

    name = "yuanrong"
    capabilities = Capabilities(tracks_writers=True, reports_capacity=True)

    def __init__(self, context: BackendContext, settings: YuanrongSettings) -> None:
        self._context = context
        self._settings = settings
        self._channels: dict[int, Channel] = {}
        self._workers: dict[str, Worker] = {}
        self._gone: list[Worker] = []
        self._opening = asyncio.Lock()
        self._closed = False

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        channel = await self._channel(unit)
        worker = await self._worker(unit)
        granted = False
        try:
            await channel.request(Alloc(block_id, block.nbytes, wait_s), timeout_s=wait_s + _ANSWER_S)
            granted = True
            key = block_key(unit.attributes["prefix"], block_id)
            await self._context.run_copy(lambda: worker.write(key, block))
            await channel.request(Seal(block_id), timeout_s=_ANSWER_S)
        except (TransferQueueError, asyncio.CancelledError) as error:
            if isinstance(error, ConnectionLostError):
                self._forget(unit)
            if granted or not isinstance(error, RequestError):  # refused: what is there was another put's
                channel.send(Abort(block_id))
            raise
        return block.nbytes

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        by_unit: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_unit.setdefault(read.unit.unit, []).append(position)
        blocks: dict[int, FetchedBlock] = {}
        buffers: list[Any] = []
        deadline = asyncio.get_running_loop().time() + timeout_s
        for positions in by_unit.values():
            unit = reads[positions[0]].unit
            # Each key once: the same block may be wanted for several fields.
            keys = list({block_key(unit.attributes["prefix"], reads[each].block): None for each in positions})
            work = self._read(unit, keys)
            try:
                found = await asyncio.wait_for(work, deadline - asyncio.get_running_loop().time())
            except (TimeoutError, asyncio.TimeoutError):
                raise WaitTimeoutError(f"the data system did not give {len(keys)} blocks in {timeout_s:g} s") from None
            buffers += found.values()
            for each in positions:
                buffer = found[block_key(unit.attributes["prefix"], reads[each].block)]
                blocks[each] = FetchedBlock(BlockView(buffer.immutable_data().cast("B")), reads[each].rows)
        return _Fetched([blocks[each] for each in range(len(reads))], buffers)

    async def _read(self, unit: UnitInfo, keys: list[str]) -> dict[str, Any]:
        worker = await self._worker(unit)
        try:
            return dict(zip(keys, await self._context.run_copy(lambda: worker.read(keys)), strict=True))
        except ConnectionLostError:
            self._forget(unit)
            raise

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        channel = self._channels.get(unit.unit)
        if channel is not None:
            channel.send(Abort(block_id))

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels.values():
            channel.close()
        left = [*self._workers.values(), *self._gone]
        self._channels, self._workers, self._gone = {}, {}, []
        asyncio.get_running_loop().call_later(_DROP_S, left.clear)

    async def _channel(self, unit: UnitInfo) -> Channel:
        self._check_open()
        channel = self._channels.get(unit.unit)
        if channel is None or channel.closed:
            async with self._opening:
                channel = self._channels.get(unit.unit)
                if channel is None or channel.closed:
                    channel = await self._context.connect(unit.address)
                    if self._closed:  # meanwhile
                        channel.close()
                        self._check_open()
                    self._channels[unit.unit] = channel
        return channel

    async def _worker(self, unit: UnitInfo) -> Worker:
        self._check_open()
        address = unit.attributes["worker"]
        async with self._opening:
            if address not in self._workers:
                try:
                    self._workers[address] = await self._context.run_copy(lambda: open_worker(address, self._settings))
                except StartError as error:
                    raise ConnectionLostError(str(error)) from error
        return self._workers[address]

    def _forget(self, unit: UnitInfo) -> None:
        """The next call reconnects: the worker may have been restarted."""
        worker = self._workers.pop(unit.attributes["worker"], None)
        if worker is not None:
            self._gone.append(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("this client of the data system is closed")


async def open_backend(context: BackendContext) -> YuanrongBackend:
    """Raises ConfigError."""
    return YuanrongBackend(context, parse_settings(context.settings))
