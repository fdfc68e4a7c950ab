"""Unit side of the Mooncake backend: a process that owns a segment, frees blocks, and notices when they were lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from transfer_queue.config.attach import join_address
from transfer_queue.config.defaults import MASTER_METRICS_PORT
from transfer_queue.control.directory import shard_of_block
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.storage.base import StoreContext, UnitStats, UnitStore
from transfer_queue.storage.mooncake import codes
from transfer_queue.storage.mooncake import store as engine_store
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.buffers import address_of
from transfer_queue.storage.mooncake.oplog import UnknownLogError
from transfer_queue.storage.mooncake.parts import block_of, prefix_of
from transfer_queue.storage.mooncake.settings import MooncakeSettings, parse_settings
from transfer_queue.storage.mooncake.store import Store, master_host

__all__ = ["MooncakeStore", "open_store"]

T = TypeVar("T")

_WATCH_S = 1.0
_COUNT_EVERY = 10
"""Blocks are counted once in so many watches: the list of keys may be long."""
_PLACES_AT_ONCE = 1000
_CLOSE_S = 10.0
_MOUNT_S = 15.0
_REMOUNT_S = 5.0
_CERTAIN_S = 3.0
"""Several masters: how long the sentinel has to be missing, as one leader may follow another meanwhile."""


class MooncakeStore(UnitStore):
    """See `UnitStore`.

    Segments and keys are known to the master alone. When it restarts, or takes this process for dead, every key of the
    segment is gone, although the segment comes back by itself. A key of this unit's own, the sentinel, tells: if it is
    gone, so are all blocks, and the unit has to register again.

    Of several masters, the next leader knows what is in their log, which may lack the latest blocks and removals: after
    each change of the leader the unit tells the controller what it holds.
    """

    def __init__(self, context: StoreContext, settings: MooncakeSettings) -> None:
        self._context = context
        self._settings = settings
        self._admin = Admin(settings.admin_address or join_address(master_host(settings), MASTER_METRICS_PORT))
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tq-mooncake")
        self._log = settings.master_log()
        self._term: str | None = None
        self._mark = np.ones(64, np.uint8)
        self._runs: dict[int, str] = {}
        """By the number of the controller."""
        self._unfreed: dict[int, None] = {}
        self._used = 0
        self._blocks = 0
        self._reachable = True
        self._intact = True
        self._lost_at = 0.0
        self._unwatched = False
        """Since the latest loss the master did not answer once: it may have restarted again."""
        self._missing_since: float | None = None
        self._closing = False
        self._complained = False
        self._watch: asyncio.Task[None] | None = None
        self._store: Store
        self._endpoint = ""

    async def open(self) -> None:
        """Mount the segment. Raises StartError."""
        await self._do(self._mount)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _MOUNT_S
        while code := await self._do(self._set_sentinel):
            if loop.time() > deadline:
                await self.close()
                reason = codes.explain(code, [self._store.name])
                raise StartError(f"the segment of storage unit {self._context.name} is not usable: {reason}")
            await asyncio.sleep(0.05)
        await self._look_for_leader()
        self._watch = asyncio.create_task(self._watch_for_ever())

    # ---------------------------------------------------------------------------------------------------- UnitStore

    def attributes(self) -> dict[str, Any]:
        return {"segment": self._store.name, "endpoint": self._endpoint}

    def registered(self, unit: int, run: str, shard: int = 0) -> None:
        old = self._runs.get(shard)
        self._runs[shard] = run
        if old not in (None, run):
            self._unfreed = {block: None for block in self._unfreed if self._shard_of(block) != shard}
            self._executor.submit(self._remove_run, old)

    async def free(self, blocks: Sequence[int]) -> None:
        self._unfreed.update(dict.fromkeys(block for block in blocks if self._shard_of(block) in self._runs))
        await self._free_pending()

    async def inventory(self) -> list[int]:
        """Raises ConnectionLostError if the master's HTTP port cannot be asked."""
        runs = list(self._runs.values())  # none: it never registered and holds no blocks
        return [block for run in runs for block in await self._do(partial(self._held, run))]

    def stats(self) -> UnitStats:
        """Sampled about once a second."""
        return UnitStats(self._context.capacity, self._used, self._blocks)

    async def close(self) -> None:
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if hasattr(self, "_store"):
            try:
                await asyncio.wait_for(self._do(self._store.close), _CLOSE_S)
            except asyncio.TimeoutError:
                self._context.log("Mooncake does not answer; the master unmounts this unit's segment by itself")
        if self._log is not None:
            self._executor.submit(self._log.close)
        self._executor.shutdown(wait=False)

    # --------------------------------------------------------------------------------------------------------- watch

    async def _watch_for_ever(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._look()
            if self._runs and self._reachable:
                await self._free_pending()
                await self._sample(count_blocks=count % _COUNT_EVERY == 0)
                count += 1

    async def _look(self) -> None:
        """Is the sentinel still there?"""
        code = (await self._do(lambda: self._store.verify([self._sentinel])))[0]
        reachable = code in (0, codes.GONE)
        self._unwatched |= not reachable
        if reachable != self._reachable:
            self._reachable = reachable
            self._context.log(
                "the Mooncake master answers again" if reachable else codes.explain(code, [self._sentinel])
            )
        if code == 0:
            self._missing_since = None
            if self._intact:
                await self._look_for_leader()
        elif code == codes.GONE and self._is_certain():
            if self._intact:
                self._intact = self._unwatched = False
                self._lost_at = asyncio.get_running_loop().time()
                self._unfreed.clear()
                self._context.log(
                    "the Mooncake master lost this unit's blocks: it restarted, or took this unit for dead"
                )
                self._context.lost()
            await self._recover()

    def _is_certain(self) -> bool:
        """Is the sentinel missing for good?"""
        now = asyncio.get_running_loop().time()
        if self._missing_since is None:
            self._missing_since = now
        return self._log is None or now - self._missing_since >= _CERTAIN_S

    async def _look_for_leader(self) -> None:
        """Has another one of several masters taken over?"""
        if self._log is None:
            return
        try:
            term = await self._do(self._log.term)
        except (ConnectionLostError, UnknownLogError) as error:
            if self._reachable:
                self._context.log(f"it is not known which Mooncake master leads: {error}")
            return
        if term in ("", self._term) or not await self._do(self._admin.ready):
            return
        if self._term is not None:
            self._context.log("another Mooncake master leads; this unit tells what it still holds")
            self._context.in_doubt()
        self._term = term

    async def _recover(self) -> None:
        """Take up a segment that came back, or make a new one: old engines do not mount theirs again."""
        code = await self._do(self._set_sentinel)
        self._unwatched |= code == codes.NOT_REACHED
        if code == 0:
            self._intact = True
            # What was stored since the first report was not under watch. Rows are lost again only if they have to be.
            (self._context.lost if self._unwatched else self._context.in_doubt)()
        elif asyncio.get_running_loop().time() > self._lost_at + _REMOUNT_S:
            self._context.log("the segment did not come back; mounting a new one")
            await self._do(self._remount)

    def _shard_of(self, block: int) -> int:
        return shard_of_block(block, self._context.shards)

    async def _free_pending(self) -> None:
        blocks: dict[int, list[int]] = {}
        for block in self._unfreed:
            blocks.setdefault(self._shard_of(block), []).append(block)
        self._unfreed = {}
        for shard, those in blocks.items():
            run = self._runs[shard]
            left = await self._do(partial(self._store.remove_blocks, run, those))
            if self._runs[shard] == run:  # else its blocks are removed with their run
                self._unfreed.update(dict.fromkeys(left))  # another one by now, if two of these overlap

    async def _sample(self, *, count_blocks: bool) -> None:
        try:
            usage = await self._do(lambda: self._admin.segment_usage(self._store.name))
            # Without the sentinel: who waits for a unit to be empty would wait for ever.
            self._used = max(0, usage[0] - self._mark.nbytes) if usage else 0
            if count_blocks:
                self._blocks = len(await self.inventory())
        except ConnectionLostError as error:
            if not self._complained:
                self._complained = True
                self._context.log(f"the figures of this unit are not known: {error}")

    # --------------------------------------------------------------------------------------------- on the one thread

    def _mount(self) -> None:
        self._endpoint = ""
        self._store = engine_store.open_store(self._settings, self._context.capacity)
        self._store.register(address_of(self._mark), self._mark.nbytes)

    def _remount(self) -> None:
        """Replace the segment. The old one goes first, as there may be no memory for both."""
        self._store.close()
        while not self._closing:
            try:
                self._mount()
            except StartError as error:
                self._context.log(str(error))
            else:
                return

    def _set_sentinel(self) -> int:
        """Store the sentinel in this unit's own segment; 0, or the code of what prevents it."""
        self._store.remove([self._sentinel])
        code = self._store.write([self._sentinel], [[self._mark]], self._store.name)[0]
        if code:
            return code
        place = self._store.places([self._sentinel]).get(self._sentinel)
        if place is None:
            return codes.NOT_REACHED
        # A segment that was just made is empty and takes it. Later ones may be unmounted, and it strays to another.
        if self._endpoint and place[1] != self._endpoint:
            self._store.remove([self._sentinel])
            return codes.NO_SPACE
        self._endpoint = place[1]
        return 0

    def _held(self, run: str) -> list[int]:
        """Blocks of ``run`` on this unit, also those stored in part."""
        blocks = block_of(self._admin.keys(prefix_of(run)), run)
        keys = list(blocks)
        held: dict[int, None] = {}
        for start in range(0, len(keys), _PLACES_AT_ONCE):
            for key, (_, endpoint) in self._places_of(keys[start : start + _PLACES_AT_ONCE]).items():
                if endpoint == self._endpoint:
                    held[blocks[key]] = None
        return list(held)

    def _places_of(self, keys: list[str]) -> dict[str, tuple[int, str]]:
        """Raises ConnectionLostError if the master does not tell: a missing block would count as lost."""
        found = self._store.places(keys)
        for _ in range(2):  # the master may be back in the moment in which it is asked for the absent ones
            absent = [key for key in keys if key not in found]
            states = self._store.verify(absent) if absent else []
            if unknown := [code for code in states if code not in (0, codes.GONE)]:
                raise ConnectionLostError(codes.explain(min(unknown), absent))
            if there := [key for key, code in zip(absent, states, strict=True) if code == 0]:
                found.update(self._store.places(there))
        return found

    def _remove_run(self, run: str) -> None:
        try:
            keys = self._admin.keys(prefix_of(run))
        except ConnectionLostError as error:
            self._context.log(f"blocks of the queue's earlier life were not removed: {error}")
            return
        for start in range(0, len(keys), _PLACES_AT_ONCE):
            self._store.remove(keys[start : start + _PLACES_AT_ONCE])

    @property
    def _sentinel(self) -> str:
        return f"tq-unit/{self._store.name}"

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)


async def open_store(context: StoreContext) -> MooncakeStore:
    """Raises ConfigError, StartError."""
    settings = {name: value for name, value in context.settings.items() if name != "prefault"}  # the arena's own
    store = MooncakeStore(context, parse_settings(settings))
    await store.open()
    return store
