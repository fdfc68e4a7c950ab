"""The account of a storage unit whose blocks lie outside of its process: clients ask for space, store, and say so."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from transfer_queue.errors import CapacityError, RequestError, StorageKeyNotFoundError
from transfer_queue.storage.base import Peer, Served, UnitStats
from transfer_queue.storage.space import SpaceQueue, SpaceRequest
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


class Ledger:
    """The blocks of a unit, their writers and the space that is left. On the unit's loop only."""

    def __init__(self, name: str, capacity: int) -> None:
        self.entries: dict[int, Entry] = {}
        self._name = name
        self._capacity = capacity
        self._used = 0
        self._peers: set[Peer] = set()
        self._writers: dict[int, int] = {}
        self._space: SpaceQueue[Entry] = SpaceQueue()

    def stats(self) -> UnitStats:
        return UnitStats(self._capacity, self._used, len(self.entries))

    def connected(self, peer: Peer) -> None:
        self._peers.add(peer)
        self._writers[peer.writer] = self._writers.get(peer.writer, 0) + 1

    def disconnected(self, peer: Peer) -> tuple[list[int], list[int]]:
        """(blocks that this connection was writing, blocks that may lack a commit if it was its writer's last)."""
        self._peers.discard(peer)
        unsealed = [number for number, each in self.entries.items() if each.writer is peer and not each.sealed]
        self._space.leave(peer)
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
        self._check_new(peer, message.block)
        problem = f"no capacity for {message.nbytes} bytes on {self._name}"
        if message.nbytes > self._capacity:
            raise CapacityError(f"{problem}: it has {self._capacity}; put smaller batches")

        def attempt() -> Entry | None:
            return self._enter(peer, message)

        entry = self._space.attempt(attempt)
        request = None if entry is not None else self._space.enter(peer, message.block, attempt, problem)
        return self._alloc(request, message.wait_s, problem)

    async def _alloc(self, request: SpaceRequest[Entry] | None, wait_s: float, problem: str) -> Served:
        if request is not None and await self._space.wait(request, wait_s) is None:
            raise CapacityError(
                f"{problem}: {self._used} of {self._capacity} are used and none became free within {wait_s:g} s; clear "
                "consumed rows or add storage"
            )
        return Served(Extent(0))

    def _enter(self, peer: Peer, message: Alloc) -> Entry | None:
        """Enter the block if there is room for it. Raises RequestError."""
        self._check_new(peer, message.block)
        if self._used + message.nbytes > self._capacity:
            return None
        entry = self.entries[message.block] = Entry(message.nbytes, peer)
        self._used += message.nbytes
        return entry

    def _check_new(self, peer: Peer, block: int) -> None:
        if block in self.entries or block >> 32 != peer.writer or peer not in self._peers:
            raise RequestError(f"block {block:#x} exists already, belongs to another writer, or its writer is gone")

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
        self._space.withdraw(numbers)
        return {number: self.entries.pop(number) for number in numbers if number in self.entries}

    def recycle(self, removed: dict[int, Entry]) -> None:
        self._used -= sum(entry.nbytes for entry in removed.values())
        self._space.serve()
