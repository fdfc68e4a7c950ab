"""Client side: puts and gets go straight to the Redis server; the storage units are not asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tq_redis.server import FREE, PUT, Keys, Settings, connect, named_errors, parse_settings
from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.errors import CapacityError, ConnectionLostError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.storage.base import (
    Backend,
    BackendContext,
    BlockRead,
    Capabilities,
    Fetched,
    FetchedBlock,
    UnitInfo,
)

__all__ = ["RedisBackend", "open_backend"]

_POLL_S = 0.05


class _Fetched(Fetched):
    """The blocks are this process's own memory: there is nothing to give back."""

    def __init__(self, blocks: list[FetchedBlock]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        pass


class RedisBackend(Backend):
    """The client side; see `Backend`."""

    name = "redis"
    capabilities = Capabilities(persistent=True, reports_capacity=True, max_block_bytes=256 << 20)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._redis = connect(settings)
        self._put = self._redis.register_script(PUT)
        self._free = self._redis.register_script(FREE)
        self._closed = False

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        self._check_open()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        keys = Keys(self._settings, unit.name)
        if block.nbytes > unit.capacity:
            raise CapacityError(f"a block of {block.nbytes} bytes exceeds the capacity of {unit.name}, {unit.capacity}")
        data = memoryview(block.to_bytes())
        while True:
            with named_errors(self._settings):
                outcome = await self._put(
                    [keys.life, keys.sizes, keys.used, keys.block(block_id)],
                    [unit.attributes["life"], block_id, unit.capacity, data],
                )
            if outcome == b"lost":
                raise ConnectionLostError(f"the Redis server at {self._settings.url} lost what {unit.name} held")
            if outcome != b"full":
                return block.nbytes
            if loop.time() >= deadline:
                raise CapacityError(
                    f"storage unit {unit.name} has no capacity left for {block.nbytes} bytes, and none became free "
                    f"within {wait_s:g} s; clear consumed rows or raise the capacity of the units"
                )
            await asyncio.sleep(min(_POLL_S, deadline - loop.time()))

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        self._check_open()
        if not reads:
            return _Fetched([])
        names = [Keys(self._settings, read.unit.name).block(read.block) for read in reads]
        try:
            with named_errors(self._settings):
                values: list[Any] = await asyncio.wait_for(self._redis.mget(names), timeout_s)
        except asyncio.TimeoutError:
            raise WaitTimeoutError(f"Redis did not send {len(names)} blocks within {timeout_s:g} s") from None
        gone = [name for name, value in zip(names, values, strict=True) if value is None]
        if gone:
            raise StorageKeyNotFoundError(f"blocks are gone from {self._settings.url}: {', '.join(gone[:8])}")
        return _Fetched([FetchedBlock(BlockView(value), read.rows) for read, value in zip(reads, values, strict=True)])

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        keys = Keys(self._settings, unit.name)
        with named_errors(self._settings):
            await self._free([keys.sizes, keys.used, keys.block(block_id)], [block_id])

    async def close(self) -> None:
        self._closed = True
        await self._redis.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("this client of Redis is closed")


async def open_backend(context: BackendContext) -> RedisBackend:
    """Raises ConfigError."""
    return RedisBackend(parse_settings(context.settings))
