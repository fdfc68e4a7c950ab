"""Unit side: an account of blocks in a store that only clients reach. Dead ones wait here for a client to remove them.

A store may keep a block in its writer's own process, so that it is the writer which is asked to remove it; once that is
gone, any client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from transfer_queue.errors import RequestError, StorageKeyNotFoundError
from transfer_queue.storage.base import Peer, Served, ServingStore, StoreContext, UnitStats
from transfer_queue.storage.ledger import Ledger
from transfer_queue.wire import messages as wire

__all__ = ["MAX_NOTE_BYTES", "RegisteredStore", "open_store"]

MAX_NOTE_BYTES = 64 << 10
"""Size limit of a manager's note of one block."""
_AT_ONCE = 256
"""Blocks in one answer."""
_AGAIN_S = 60.0
"""Time after which another client is asked to remove a block."""


class RegisteredStore(ServingStore):
    """See `ServingStore`."""

    def __init__(self, context: StoreContext) -> None:
        self._ledger = Ledger(context.name, context.capacity)
        self._dead: dict[int, bytes] = {}
        self._asked: dict[int, tuple[Peer, float]] = {}
        """Block -> whom, and when."""
        self._peers: set[Peer] = set()
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------------------------------------------- UnitStore

    async def free(self, blocks: Sequence[int]) -> None:
        self._bury(blocks)

    async def inventory(self) -> list[int]:
        return list(self._ledger.entries)

    def stats(self) -> UnitStats:
        return self._ledger.stats()

    async def close(self) -> None:
        pass

    # ---------------------------------------------------------------------------------------------------- ServingStore

    def connected(self, peer: Peer) -> dict[str, Any]:
        self._peers.add(peer)
        self._ledger.connected(peer)
        return {}

    def disconnected(self, peer: Peer) -> list[int]:
        self._peers.discard(peer)
        self._asked = {number: asked for number, asked in self._asked.items() if asked[0] is not peer}
        unsealed, orphans = self._ledger.disconnected(peer)
        self._bury(unsealed)
        return orphans

    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        if not isinstance(message, wire.Fill) or nbytes > MAX_NOTE_BYTES:
            raise RequestError(f"{type(message).__name__} with {nbytes} bytes: a note has up to {MAX_NOTE_BYTES}")
        return None

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if isinstance(message, wire.Alloc):
            return self._ledger.alloc(peer, message)
        if isinstance(message, wire.Fill):
            self._ledger.seal(peer, message.block, bytes(payload or b""))
            return Served(wire.Stored(self.stats()))
        if isinstance(message, wire.Read):
            notes = [self._note(part.block) for part in message.parts]
            return Served(wire.SubBlocks([len(note) for note in notes]), notes)
        if isinstance(message, wire.Sweep):
            return self._sweep(peer, message)
        if isinstance(message, wire.Stats):
            return Served(wire.Stored(self.stats()))
        raise RequestError(f"{type(message).__name__} is not a request of a storage unit for a registered manager")

    def notice(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.Abort) and message.block >> 32 == peer.writer:
            self._bury([message.block])

    def _note(self, block: int) -> bytes:
        entry = self._ledger.entries.get(block)
        if entry is None or not entry.sealed:
            raise StorageKeyNotFoundError(f"block {block:#x} is not here: cleared, or never stored")
        return entry.note

    # ------------------------------------------------------------------------------------------------- dead blocks

    def _bury(self, blocks: Iterable[int]) -> None:
        removed = self._ledger.remove(blocks)
        self._ledger.recycle(removed)
        self._dead.update((number, entry.note) for number, entry in removed.items())
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _sweep(self, peer: Peer, message: wire.Sweep) -> Served:
        loop = asyncio.get_running_loop()
        for number in np.frombuffer(message.removed, "<i8").tolist():
            if self._asked.get(number, (None,))[0] is peer:
                del self._asked[number], self._dead[number]
        deadline = loop.time() + message.wait_s
        while not (blocks := self._for(peer, loop.time())):
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except (TimeoutError, asyncio.TimeoutError):
                break
        self._asked.update(dict.fromkeys(blocks, (peer, loop.time())))
        notes = [self._dead[number] for number in blocks]
        return Served(wire.Swept(np.asarray(blocks, "<i8").tobytes(), [len(note) for note in notes]), notes)

    def _for(self, peer: Peer, now: float) -> list[int]:
        if peer not in self._peers:
            return []
        mine = (
            number
            for number in self._dead
            if (number not in self._asked or now - self._asked[number][1] >= _AGAIN_S)
            and (number >> 32 == peer.writer or not self._ledger.is_connected(number >> 32))
        )
        return [number for number, _ in zip(mine, range(_AT_ONCE), strict=False)]


async def open_store(context: StoreContext) -> RegisteredStore:
    return RegisteredStore(context)
