"""Registered memory that blocks are sent from and received into. Registering is slow; buffers are recycled."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.columns.copying import copy_bytes

__all__ = ["Bytes", "Lease", "RegisteredPool", "address_of", "copy_into", "merged_spans"]

Bytes = NDArray[np.uint8]

_ALIGN = 4096
_REGION_BYTES = 64 << 20


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def merged_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes), ascending; those that overlap made one, as the engine refuses to register memory twice."""
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(spans):
        start, size = merged[-1] if merged else (0, 0)
        if address < start + size:
            merged[-1] = (start, max(size, address + nbytes - start))
        else:
            merged.append((address, nbytes))
    return merged


class _Region:
    """One registered mapping with a sorted list of free extents."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self._map = mmap.mmap(-1, nbytes)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if pinned:
            with suppress(OSError):
                self._map.madvise(mmap.MADV_DONTFORK)  # pinned pages must not become copy-on-write in a forked child
        self.array: Bytes = np.frombuffer(self._map, np.uint8)
        self._free = [(0, nbytes)]
        self.kept = 0
        """Leases in it that batches keep."""

    @property
    def idle(self) -> bool:
        return self._free == [(0, self.array.nbytes)]

    def take(self, nbytes: int) -> int | None:
        """First fit; the offset, or None."""
        for position, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[position : position + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for extent in sorted([*self._free, (start, start + nbytes)]):
            if merged and merged[-1][1] == extent[0]:
                merged[-1] = (merged[-1][0], extent[1])
            else:
                merged.append(extent)
        self._free = merged


class Lease:
    """``array``: uint8, the bytes asked for. Counted: the memory is recycled when each holder has released it."""

    def __init__(self, pool: RegisteredPool, region: _Region, start: int, nbytes: int) -> None:
        self.array = region.array[start : start + nbytes]
        self._pool = pool
        self._region = region
        self._start = start
        self._holders = 1
        self._kept = False

    def keep(self) -> bool:
        """May a batch keep this for as long as it likes? Half of the pool is left to transfers, and a child of a fork
        has no pinned memory."""
        with self._pool.lock:
            if not self._kept and self._pool.can_spare(self._region):
                self._kept = True
                self._region.kept += 1
        return self._kept

    def hold(self) -> None:
        with self._pool.lock:
            self._holders += 1

    def release(self) -> None:
        """Safe from any thread."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders:
                return
            self._region.kept -= self._kept
            self._region.give(self._start, _rounded(self.array.nbytes))
        self._pool.notify()


def _rounded(nbytes: int) -> int:
    return max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)


class RegisteredPool:
    """Grows region by region up to ``limit`` bytes, then callers wait, first come first served.

    ``register`` and ``unregister`` get (address, nbytes); they run through ``run``, off the loop.
    """

    def __init__(
        self,
        limit: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int, int], None],
        run: Callable[[Callable[[], None]], Awaitable[None]],
        *,
        pinned: bool = True,
    ) -> None:
        """``pinned``: registering pins the memory, as for RDMA."""
        self.limit = _rounded(limit)
        self._pinned = pinned
        self.lock = threading.Lock()
        self._register = register
        self._unregister = unregister
        self._run = run
        self._regions: list[_Region] = []
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def registered(self) -> int:
        """Bytes registered now."""
        return sum(region.array.nbytes for region in self._regions)

    def can_spare(self, region: _Region) -> bool:
        """Return whether batches may keep leases in ``region`` too. Under ``lock``."""
        kept = sum(each.array.nbytes for each in self._regions if each.kept or each is region)
        return not self._pinned and kept <= self.limit // 2

    async def take(self, nbytes: int, deadline: float) -> Lease:
        """``nbytes`` of registered memory; raises asyncio.TimeoutError at ``deadline`` (loop time).

        Needs ``nbytes <= limit``.
        """
        if not self._turn.locked() and (lease := self._fit(nbytes)) is not None:
            return lease
        # One caller at a time: growth is not repeated, and callers are served in order.
        await asyncio.wait_for(self._turn.acquire(), self._left(deadline))
        try:
            while True:
                lease = self._fit(nbytes)
                if lease is not None:
                    return lease
                if not await self._grow(nbytes):
                    # No lost wake-up: notify() arrives through the loop, which has not run since the last look.
                    self._waiter = self._loop.create_future()
                    await asyncio.wait_for(self._waiter, self._left(deadline))
        finally:
            self._turn.release()

    def notify(self) -> None:
        """Memory was released, maybe by another thread."""
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(self._wake)

    async def close(self) -> None:
        """Unregister everything. Views that are still held keep their memory, unregistered."""
        regions, self._regions = self._regions, []
        await self._run(lambda: self._drop(regions))

    def _fit(self, nbytes: int) -> Lease | None:
        size = _rounded(nbytes)
        with self.lock:
            for region in self._regions:
                start = region.take(size)
                if start is not None:
                    return Lease(self, region, start, nbytes)
        return None

    async def _grow(self, nbytes: int) -> bool:
        """Add a region that fits, in place of idle ones that do not if the limit asks for it."""
        size = min(max(_rounded(nbytes), _REGION_BYTES), self.limit)
        with self.lock:
            idle = [region for region in self._regions if region.idle]
            room = self.limit - self.registered
            spare = sum(region.array.nbytes for region in idle)
            if room < size:
                size = max(_rounded(nbytes), room) if room >= nbytes else _rounded(nbytes)
            if room + spare < size:
                return False
            dropped: list[_Region] = []
            while room < size:
                dropped.append(idle.pop())
                room += dropped[-1].array.nbytes
            self._regions = [region for region in self._regions if region not in dropped]

        def work() -> None:
            self._drop(dropped)
            region = _Region(size, self._pinned)
            self._register(address_of(region.array), size)
            with self.lock:
                self._regions.append(region)

        await self._run(work)
        return True

    def _drop(self, regions: list[_Region]) -> None:
        for region in regions:
            self._unregister(address_of(region.array), region.array.nbytes)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._loop.time())


def copy_into(target: Bytes, sources: deque[Any]) -> None:
    """Fill ``target`` from the front of ``sources`` (buffers), leaving the rest there."""
    position = 0
    while position < target.nbytes:
        source = np.frombuffer(sources.popleft(), np.uint8)
        taken = min(source.nbytes, target.nbytes - position)
        copy_bytes(target[position : position + taken], source[:taken])
        if taken < source.nbytes:
            sources.appendleft(source[taken:])
        position += taken
