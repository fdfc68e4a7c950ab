"""Unit side: frees blocks, reports what is used, and notices when the Redis server lost everything."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from tq_redis.server import FREE, Keys, Settings, connect, named_errors, parse_settings
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.storage.base import StoreContext, UnitStats, UnitStore

__all__ = ["RedisStore", "open_store"]

_WATCH_S = 1.0


class RedisStore(UnitStore):
    """The unit side; see `UnitStore`."""

    def __init__(self, context: StoreContext, settings: Settings) -> None:
        self._context = context
        self._settings = settings
        self._keys = Keys(settings, context.name)
        self._redis = connect(settings)
        self._free = self._redis.register_script(FREE)
        self._life = ""
        self._used = 0
        self._blocks = 0
        self._reachable = True
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises StartError: no server, or one that evicts."""
        try:
            with named_errors(self._settings):
                memory = await self._redis.info("memory")
                await self._begin_life()
        except ConnectionLostError as error:
            await self._redis.aclose()
            raise StartError(str(error)) from error
        if memory["maxmemory"] and memory["maxmemory_policy"] != "noeviction":
            await self._redis.aclose()
            raise StartError(
                f"the Redis server at {self._settings.url} evicts unread data ({memory['maxmemory_policy']}): start it "
                "with --maxmemory-policy noeviction"
            )
        await self._count()
        self._watching = asyncio.create_task(self._watch())

    @property
    def incarnation(self) -> str:
        return self._life

    def attributes(self) -> dict[str, Any]:
        return {"life": self._life}

    async def free(self, blocks: Sequence[int]) -> None:
        if blocks:
            keys = [self._keys.sizes, self._keys.used, *map(self._keys.block, blocks)]
            with named_errors(self._settings):
                await self._free(keys, list(blocks))
                await self._count()

    async def inventory(self) -> list[int]:
        with named_errors(self._settings):
            return [int(number) for number in await self._redis.hkeys(self._keys.sizes)]

    def stats(self) -> UnitStats:
        """Sampled once a second."""
        return UnitStats(self._context.capacity, self._used, self._blocks)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._redis.aclose()

    async def _begin_life(self) -> None:
        """Go on with the life that the server knows, or begin a new one."""
        await self._redis.set(self._keys.life, secrets.token_hex(8), nx=True)
        life: Any = await self._redis.get(self._keys.life)
        self._life = life.decode()

    async def _count(self) -> None:
        self._used = int(await self._redis.get(self._keys.used) or 0)
        self._blocks = await self._redis.hlen(self._keys.sizes)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                with named_errors(self._settings):
                    before = self._life
                    await self._begin_life()
                    await self._count()
            except ConnectionLostError as error:
                if self._reachable:
                    self._context.log(str(error))
                self._reachable = False
                continue
            self._reachable = True
            if self._life != before:
                self._context.log("the Redis server forgot this unit's blocks")
                self._context.lost()


async def open_store(context: StoreContext) -> RedisStore:
    """Raises ConfigError, StartError."""
    store = RedisStore(context, parse_settings(context.settings))
    await store.open()
    return store
