"""The account of a storage unit whose blocks lie outside of its process: clients ask for space, store, and say so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from transfer_queue.errors import CapacityError, RequestError, StorageKeyNotFoundError
from transfer_queue.storage.base import Peer, Served, UnitStats
from transfer_queue.wire.messages import Alloc, Extent

__all__ = ["Entry", "Ledger"]


@dataclass(eq=False)
class Entry:
    """A block that has its space."""

    nbytes: int
    writer: Peer
    sealed: bool = False
    note: bytes = b""
    """What readers need to know besides, where the writer left something."""


class _Waiter(NamedTuple):
    peer: Peer
    message: Alloc
    granted: asyncio.Future[None]


class Ledger:
    """What is there, whose it is, and how much room is left. On the unit's loop only."""

    def __init__(self, name: str, capacity: int) -> None:
        self.entries: dict[int, Entry] = {}
        self._name = name
        self._capacity = capacity
        self._used = 0
        self._peers: set[Peer] = set()
        self._writers: dict[int, int] = {}
        self._awaited: set[int] = set()
        """Blocks that wait for space, as long as their writer wants them."""
        self._waiters: deque[_Waiter] = deque()
        """First come, first served: small blocks may not starve a large one."""

    def stats(self) -> UnitStats:
        return UnitStats(self._capacity, self._used, len(self.entries))

    def connected(self, peer: Peer) -> None:
        self._peers.add(peer)
        self._writers[peer.writer] = self._writers.get(peer.writer, 0) + 1

    def disconnected(self, peer: Peer) -> tuple[list[int], list[int]]:
        """(blocks that this connection was writing, blocks that may lack a commit if it was its writer's last)."""
        self._peers.discard(peer)
        unsealed = [number for number, each in self.entries.items() if each.writer is peer and not each.sealed]
        self._serve_waiters()
        self._writers[peer.writer] -= 1
        if self._writers[peer.writer]:
            return unsealed, []
        del self._writers[peer.writer]
        return unsealed, [number for number in self.entries if number >> 32 == peer.writer]

    def is_connected(self, writer: int) -> bool:
        return writer in self._writers

    def alloc(self, peer: Peer, message: Alloc) -> Coroutine[Any, Any, Served]:
        """Set space aside; gives the answer to that. Raises CapacityError after ``message.wait_s`` seconds without it,
        RequestError."""
        self._awaited.add(message.block)
        return self._alloc(peer, message)

    async def _alloc(self, peer: Peer, message: Alloc) -> Served:
        problem = f"no capacity for {message.nbytes} bytes on {self._name}"
        try:
            if message.block in self.entries or message.block >> 32 != peer.writer:
                raise RequestError(f"block {message.block:#x} exists already, or belongs to another writer")
            if message.nbytes > self._capacity:
                raise CapacityError(f"{problem}: it has {self._capacity}; put smaller batches")
            if self._waiters or not self._grant(peer, message):
                await self._wait(_Waiter(peer, message, asyncio.get_running_loop().create_future()), problem)
            return Served(Extent(0))
        finally:
            self._awaited.discard(message.block)

    def _grant(self, peer: Peer, message: Alloc) -> bool:
        """Enter the block if there is room for it. Raises RequestError for one that nobody waits for any more."""
        if message.block in self.entries or peer not in self._peers or message.block not in self._awaited:
            raise RequestError(f"block {message.block:#x} exists already, was given up, or its writer is gone")
        if self._used + message.nbytes > self._capacity:
            return False
        self.entries[message.block] = Entry(message.nbytes, peer)
        self._used += message.nbytes
        return True

    async def _wait(self, waiter: _Waiter, problem: str) -> None:
        self._waiters.append(waiter)
        wait_s = waiter.message.wait_s
        await asyncio.wait([waiter.granted], timeout=max(0.0, wait_s))
        if waiter.granted.done():
            waiter.granted.result()
            return
        self._waiters.remove(waiter)
        self._serve_waiters()
        raise CapacityError(
            f"{problem}: {self._used} of {self._capacity} are used and none became free within {wait_s:g} s; clear "
            "consumed rows or add storage"
        )

    def _serve_waiters(self) -> None:
        while self._waiters:
            peer, message, granted = self._waiters[0]
            try:
                if not self._grant(peer, message):
                    return
                granted.set_result(None)
            except RequestError as error:
                granted.set_exception(error)
            self._waiters.popleft()

    def seal(self, peer: Peer, block: int, note: bytes = b"") -> None:
        """The block is stored. Raises StorageKeyNotFoundError for one that is not being written by ``peer``."""
        entry = self.entries.get(block)
        if entry is None or entry.writer is not peer:
            raise StorageKeyNotFoundError(f"block {block:#x} is not being written over this connection")
        entry.sealed, entry.note = True, note

    def remove(self, blocks: Iterable[int]) -> dict[int, Entry]:
        """Forget blocks, also those that wait for space; unknown ones are ignored. Their space is in use until
        ``recycle``."""
        numbers = list(blocks)
        self._awaited.difference_update(numbers)
        return {number: self.entries.pop(number) for number in numbers if number in self.entries}

    def recycle(self, removed: dict[int, Entry]) -> None:
        self._used -= sum(entry.nbytes for entry in removed.values())
        self._serve_waiters()
