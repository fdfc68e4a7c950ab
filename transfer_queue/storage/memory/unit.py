"""Unit side of the memory backend: blocks in one shared-memory arena.

If a hole is large enough, a block is stored in one piece, which clients of this host write and read in place. Otherwise
it is stored in the largest holes, and sent to and from its clients as if they were on another host.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer_queue.control.requests import HandlerTable
from transfer_queue.errors import CapacityError, RequestError, StartError, StorageKeyNotFoundError
from transfer_queue.storage.base import Peer, Served, ServingStore, StoreContext, UnitStats
from transfer_queue.storage.memory.arena import ArenaFile, remove_abandoned
from transfer_queue.storage.memory.ghosts import Ghosts, PeerState
from transfer_queue.storage.memory.holders import Holders
from transfer_queue.storage.memory.index import BlockIndex, Pieces
from transfer_queue.storage.memory.selection import scatter, select_part
from transfer_queue.storage.memory.shared_table import SharedBlockTable, table_bytes
from transfer_queue.storage.memory.spill import Spill, open_spill
from transfer_queue.storage.space import SpaceQueue, SpaceRequest
from transfer_queue.wire import messages as wire

__all__ = ["INLINE_BYTES", "MemoryStore", "StoredBlock", "open_store"]

INLINE_BYTES = 64 << 10
"""Blocks up to this size travel within the Put message."""
_MOST_PIECES = 1 << 14
"""Most pieces of one block: a block of 5 % of a unit fits into holes of 1/16384 of its size on average."""
_LIFE_BITS = 20
"""Locks of the clients of each process of a unit: one number a connection."""


@dataclass(eq=False)
class StoredBlock:
    pieces: Pieces
    """Place of the block. Clients do not know several pieces: the unit writes and reads them."""
    nbytes: int
    writer: Peer | None
    """None: of an earlier process of this unit."""
    sealed: bool = False
    filling: bool = False
    """Its bytes are arriving right now; it must not be freed under the receiver."""
    dropped: bool = False


class MemoryStore(ServingStore):
    """Blocks by id; see :mod:`transfer_queue.wire.messages` for what clients may ask."""

    _handlers = HandlerTable()

    def __init__(
        self, context: StoreContext, file: ArenaFile, index: BlockIndex | None = None, spill: Spill | None = None
    ) -> None:
        self._context = context
        self._file = file
        self._index = index
        self.spill = spill
        self._to_disk = context.durability == "node"
        self._descriptor = file.descriptor
        self._table: SharedBlockTable | None = None
        if file.nbytes > file.table_start:
            self._table = SharedBlockTable(file.memory[file.table_start :])
        self._extents = file.extents()
        self._blocks: dict[int, StoredBlock] = {}
        self._holders = Holders()
        self._by_writer: dict[int, set[int]] = {}
        self._peers: dict[Peer, PeerState] = {}
        self._writers: dict[int, int] = {}
        self._space: SpaceQueue[StoredBlock] = SpaceQueue()
        self._ghosts = Ghosts(self._descriptor, self._bury)
        self._next_lock = 1
        self._closed = False
        if index is not None:
            self._adopt(index)

    def _adopt(self, index: BlockIndex) -> None:
        """Take over the blocks of earlier processes. What their clients may still touch is not recycled meanwhile."""
        self._extents.adopt(piece for place in index.blocks.values() for piece in place.pieces)
        earlier = PeerState("clients of an earlier process", 1, index.life << _LIFE_BITS)
        for number, place in index.blocks.items():
            self._blocks[number] = StoredBlock(place.pieces, place.nbytes, None, place.sealed)
            self._by_writer.setdefault(number >> 32, set()).add(number)
            self._holders.add(number >> 32, place.nbytes, "a client of an earlier process")
            if not place.sealed:
                earlier.unsealed.add(number)
        self._next_lock = earlier.locks + 1
        if self._blocks:
            earlier.leases.add(self._lease(self._blocks.values()))
            self._ghosts.add(earlier)

    @property
    def incarnation(self) -> str | None:
        """Identity of the memory, if that outlives the process."""
        return None if self._index is None else self._index.incarnation

    @property
    def scopes(self) -> dict[int, str]:
        """Partitions of the blocks that earlier processes of this unit tagged."""
        kept = {} if self._index is None else self._index.blocks
        return {number: place.scope for number, place in kept.items() if place.scope}

    # ------------------------------------------------------------------------------------------------------ UnitStore

    async def free(self, blocks: Sequence[int]) -> None:
        for number in blocks:
            self._drop(number)
        self._write_drops()
        self._space.serve()

    async def inventory(self) -> list[int]:
        return list(self._blocks)

    def stats(self) -> UnitStats:
        return UnitStats(self._extents.capacity, self._extents.used, len(self._blocks))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ghosts.close()
        for peer in self._peers:
            self._space.leave(peer)
        if self.spill is not None:
            async with self.spill.moving:  # the arena is not unmapped under a write
                self.spill.close()
        if self._table is not None:
            self._table.release()
            self._table = None
        self._file.close()
        if self._index is not None:
            self._index.close()

    def abandon_in_child(self) -> None:
        """After a fork: let go of the memory, which goes on in the parent."""
        self._file.abandon_in_child()

    # ---------------------------------------------------------------------------------------------------- ServingStore

    def connected(self, peer: Peer) -> dict[str, Any]:
        lock, self._next_lock = self._next_lock, self._next_lock + 1
        self._peers[peer] = PeerState(peer.client_id, lock)
        self._writers[peer.writer] = self._writers.get(peer.writer, 0) + 1
        attributes = {"path": str(self._file.path), "size": self._file.nbytes, "nonce": self._file.nonce, "lock": lock}
        return attributes if self._table is None else {**attributes, "table": self._file.table_start}

    def disconnected(self, peer: Peer) -> list[int]:
        state = self._peers.pop(peer)
        self._space.leave(peer)
        left = self._writers[peer.writer] = self._writers[peer.writer] - 1
        if state.unsealed or state.leases:
            self._ghosts.add(state)
        if left:
            return []
        del self._writers[peer.writer]
        return list(self._by_writer.get(peer.writer, ()))

    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        if isinstance(message, wire.Put):
            if nbytes > INLINE_BYTES:
                raise RequestError(f"a Put carries at most {INLINE_BYTES} bytes, not {nbytes}")
            return None
        if isinstance(message, wire.Fill):
            block = self._unsealed(peer, message.block)
            if block.filling or block.nbytes != nbytes:
                raise RequestError(
                    f"block {message.block:#x} has {block.nbytes} bytes and is filled once, not by {nbytes}"
                )
            block.filling = True
            return self._views(block)[0] if len(block.pieces) == 1 else None
        raise RequestError(f"{type(message).__name__} takes no payload")

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RequestError(f"{type(message).__name__} is not a request of a memory storage unit")
        answer: Served | Coroutine[Any, Any, Served] = handler(self, peer, message, payload)
        return answer

    @_handlers.on(wire.Stats)
    def _stats(self, peer: Peer, message: wire.Stats, payload: memoryview | None) -> Served:
        return Served(wire.Stored(self.stats()))

    def notice(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.Abort):
            if message.block >> 32 == peer.writer:
                self._space.withdraw([message.block])
                self._drop(message.block)
                self._space.serve()
        elif isinstance(message, wire.Release):
            leases = self._peers[peer].leases
            if message.lease in leases:
                leases.discard(message.lease)
                self._release(message.lease)

    # ---------------------------------------------------------------------------------------------------------- writing

    @_handlers.on(wire.Put)
    def _put(self, peer: Peer, message: wire.Put, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if payload is None:
            raise RequestError("Put without payload")
        block = self._take_space(peer, message.block, len(payload), message.wait_s, True)
        if isinstance(block, StoredBlock):
            return self._store(peer, message, payload, block)
        return self._put_later(peer, message, payload, block)

    async def _put_later(
        self, peer: Peer, message: wire.Put, payload: memoryview, waiting: Coroutine[Any, Any, StoredBlock]
    ) -> Served:
        answer = self._store(peer, message, payload, await waiting)
        return answer if isinstance(answer, Served) else await answer

    def _store(
        self, peer: Peer, message: wire.Put, payload: memoryview, block: StoredBlock
    ) -> Served | Coroutine[Any, Any, Served]:
        scatter(payload, self._views(block))
        return self._make_readable(peer, message.block, block, message.scope)

    @_handlers.on(wire.Alloc)
    def _alloc(
        self, peer: Peer, message: wire.Alloc, payload: memoryview | None
    ) -> Served | Coroutine[Any, Any, Served]:
        block = self._take_space(peer, message.block, message.nbytes, message.wait_s, message.pieces)
        return self._allocated(message, block) if isinstance(block, StoredBlock) else self._alloc_later(message, block)

    async def _alloc_later(self, message: wire.Alloc, waiting: Coroutine[Any, Any, StoredBlock]) -> Served:
        return self._allocated(message, await waiting)

    def _allocated(self, message: wire.Alloc, block: StoredBlock) -> Served:
        if self._index is not None:
            try:
                self._index.allocated(message.block, block.pieces, message.scope)
            except OSError as error:
                raise self._refused(message.block, error) from None
        return Served(wire.Extent(block.pieces[0][0] if len(block.pieces) == 1 else -1))

    @_handlers.on(wire.Seal, wire.Fill)
    def _seal(
        self, peer: Peer, message: wire.Seal | wire.Fill, payload: memoryview | None
    ) -> Served | Coroutine[Any, Any, Served]:
        block = self._unsealed(peer, message.block)
        if len(block.pieces) == 1:
            return self._filled(peer, message.block, block)
        if payload is None:
            raise RequestError(f"block {message.block:#x} lies in pieces: it is sent, not written in place")
        return self._fill_pieces(peer, message.block, block, payload)

    async def _fill_pieces(self, peer: Peer, number: int, block: StoredBlock, payload: memoryview) -> Served:
        lease = self._lease([block])  # its memory is not reused during the copy, even if the writer ends
        try:
            await asyncio.get_running_loop().run_in_executor(None, scatter, payload, self._views(block))
        finally:
            self._release(lease)
        if peer not in self._peers:  # its connection ended meanwhile, and the block goes with its writer
            block.filling = False
            raise StorageKeyNotFoundError(f"the writer of block {number:#x} is gone")
        if self._unsealed(peer, number) is not block:
            raise StorageKeyNotFoundError(f"block {number:#x} was dropped while it was written")
        answer = self._filled(peer, number, block)
        return answer if isinstance(answer, Served) else await answer

    def _filled(self, peer: Peer, number: int, block: StoredBlock) -> Served | Coroutine[Any, Any, Served]:
        block.filling = False
        if block.dropped:
            self._drop(number)
            self._space.serve()
            raise StorageKeyNotFoundError(f"block {number:#x} was dropped while it was written")
        scope = "" if self._index is None else self._index.blocks[number].scope
        return self._make_readable(peer, number, block, scope)

    def _unsealed(self, peer: Peer, number: int) -> StoredBlock:
        block = self._blocks.get(number)
        if block is None or block.sealed or block.writer is not peer:
            raise StorageKeyNotFoundError(f"block {number:#x} is not being written over this connection")
        return block

    def _make_readable(
        self, peer: Peer, number: int, block: StoredBlock, scope: str
    ) -> Served | Coroutine[Any, Any, Served]:
        """The acknowledgement, which waits for what the durability asks."""
        if self._index is not None:
            try:
                self._index.sealed(number, block.pieces, scope)
            except OSError as error:
                raise self._refused(number, error) from None
        block.sealed = True
        if self._table is not None and block.nbytes <= INLINE_BYTES and len(block.pieces) == 1:
            self._table.enter(number, *block.pieces[0])
        self._peers[peer].unsealed.discard(number)
        if self._to_disk and self._index is not None:
            return self._sync()
        return Served(wire.Stored(self.stats()))

    def _refused(self, number: int, error: OSError) -> CapacityError:
        """The index takes no record of the block: it is dropped."""
        self._drop(number)
        self._space.serve()
        return CapacityError(
            f"storage unit {self._context.name} cannot keep a block: its index in {self._context.directory} takes no "
            f"more ({error.strerror}); make room there"
        )

    async def _sync(self) -> Served:
        assert self._index is not None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, os.fdatasync, self._descriptor)
        await loop.run_in_executor(None, self._index.sync)
        return Served(wire.Stored(self.stats()))

    def _drop(self, number: int) -> None:
        block = self._blocks.get(number)
        if block is None:
            return
        if block.filling or (not block.sealed and block.writer not in self._peers):
            block.dropped = True  # the receiver, or a ghost, frees it when the memory is quiet
            return
        del self._blocks[number]
        self._holders.remove(number >> 32, block.nbytes)
        if self._index is not None:
            self._index.dropped(number)
        numbers = self._by_writer[number >> 32]
        numbers.discard(number)
        if not numbers:
            del self._by_writer[number >> 32]
        state = None if block.writer is None else self._peers.get(block.writer)
        if state is not None:
            state.unsealed.discard(number)
        self._give_back(number, block)

    def _give_back(self, number: int, block: StoredBlock) -> None:
        """Recycle the memory of a dropped block."""
        self._hide(number)
        if self.spill is None or not self.spill.forget(number):
            self._free(block.pieces)

    def _hide(self, number: int) -> None:
        """Remove the block from the shared table, because its memory is about to be used again."""
        if self._table is not None:
            self._table.remove(number)

    def _free(self, pieces: Pieces) -> None:
        for offset, _ in pieces:
            self._extents.free(offset)

    # ---------------------------------------------------------------------------------------------------------- reading

    @_handlers.on(wire.Open)
    def _open(self, peer: Peer, message: wire.Open, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if self.spill is not None and self.spill.has_any(message.blocks):
            return self._open_spilled(message.blocks)
        blocks = [self._readable(number) for number in message.blocks]
        lease = self._lease(blocks)
        # Small blocks are cheaper to send than to lease.
        if sum(block.nbytes for block in blocks) > INLINE_BYTES and all(len(block.pieces) == 1 for block in blocks):
            self._peers[peer].leases.add(lease)
            return Served(wire.Extents(lease, [block.pieces[0] for block in blocks]))
        data = [view for block in blocks for view in self._views(block)]
        return self._sent(data, [block.nbytes for block in blocks], lease)

    async def _open_spilled(self, numbers: Sequence[int]) -> Served:
        """All of the blocks are sent, those in the arena as well: the reader expects them in one place."""
        data, lease = await self._bytes_of(numbers)
        return self._sent(data, [len(each) for each in data], lease)

    def _sent(self, data: Sequence[memoryview], sizes: Sequence[int], lease: int) -> Served:
        """The answer to an Open whose blocks are its payload."""
        places = itertools.accumulate(sizes[:-1], initial=0)
        return Served(wire.Extents(0, list(zip(places, sizes, strict=True))), data, lambda: self._release(lease))

    @_handlers.on(wire.Read)
    def _read(self, peer: Peer, message: wire.Read, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        blocks = [self._readable(part.block) for part in message.parts]
        spilled = self.spill is not None and self.spill.has_any(part.block for part in message.parts)
        if spilled or any(len(block.pieces) > 1 for block in blocks):
            return self._read_copied(message)
        parts = [select_part(self._views(block)[0], part) for block, part in zip(blocks, message.parts, strict=True)]
        return self._parts(parts, self._lease(blocks))

    async def _read_copied(self, message: wire.Read) -> Served:
        data, lease = await self._bytes_of([part.block for part in message.parts])
        try:
            parts = [select_part(each, part) for each, part in zip(data, message.parts, strict=True)]
        except BaseException:
            self._release(lease)
            raise
        return self._parts(parts, lease)

    def _parts(self, parts: list[tuple[list[memoryview], int]], lease: int) -> Served:
        payload = [segment for segments, _ in parts for segment in segments]
        return Served(wire.SubBlocks([nbytes for _, nbytes in parts]), payload, lambda: self._release(lease))

    async def _bytes_of(self, numbers: Sequence[int]) -> tuple[list[memoryview], int]:
        """All bytes of each block in one piece, and a lease on the blocks in the arena."""
        spill = self.spill
        blocks = {number: self._readable(number) for number in numbers}
        spilled = {number for number in blocks if spill is not None and spill.has(number)}
        lease = self._lease(block for number, block in blocks.items() if number not in spilled)
        found = []
        try:
            for number in numbers:
                if spill is None or number not in spilled:
                    found.append(await self._whole(blocks[number]))
                    continue
                data = await spill.read(number) if spill.has(number) else None
                if data is None:
                    raise StorageKeyNotFoundError(f"block {number:#x} is gone from storage unit {self._context.name}")
                found.append(data)
        except BaseException:
            self._release(lease)
            raise
        return found, lease

    async def _whole(self, block: StoredBlock) -> memoryview:
        views = self._views(block)
        if len(views) == 1:
            return views[0]
        return memoryview(await asyncio.get_running_loop().run_in_executor(None, b"".join, views))

    def _views(self, block: StoredBlock) -> list[memoryview]:
        return [self._file.memory[offset : offset + nbytes] for offset, nbytes in block.pieces]

    def _lease(self, blocks: Iterable[StoredBlock]) -> int:
        return self._extents.lease([offset for block in blocks for offset, _ in block.pieces])

    def _release(self, lease: int) -> None:
        if self._extents.release(lease):
            self._space.serve()

    def _readable(self, number: int) -> StoredBlock:
        block = self._blocks.get(number)
        if block is None or not block.sealed:
            raise StorageKeyNotFoundError(f"block {number:#x} is gone from storage unit {self._context.name}")
        return block

    # ------------------------------------------------------------------------------------------------------------ space

    def _take_space(
        self, peer: Peer, number: int, nbytes: int, wait_s: float, in_pieces: bool
    ) -> StoredBlock | Coroutine[Any, Any, StoredBlock]:
        """Return a new block, or what waits for its space. Raises CapacityError, RequestError."""

        def attempt() -> StoredBlock | None:
            return self._allocate(peer, number, nbytes, in_pieces)

        self._check_new(peer, number)

        block = self._space.attempt(attempt)
        if block is not None:
            return block
        problem = f"storage unit {self._context.name} has no capacity for {nbytes} bytes"
        if nbytes > self._extents.capacity:
            raise CapacityError(f"{problem}: its capacity is {self._extents.capacity}; put smaller batches")
        return self._wait_for_space(number, self._space.enter(peer, number, attempt, problem), wait_s, problem)

    async def _wait_for_space(
        self, number: int, request: SpaceRequest[StoredBlock], wait_s: float, problem: str
    ) -> StoredBlock:
        while not request.settled.done() and await self._spill_one():
            pass
        block = await self._space.wait(request, wait_s)
        if block is None:
            waited = f", and too little was cleared within {wait_s:g} s; clear consumed rows or add storage"
            disk = f"; {self.spill.problem}" if self.spill and self.spill.problem else ""
            raise CapacityError(f"{problem}: {self._usage()}{waited if wait_s > 0 else ''}{disk}")
        if self._blocks.get(number) is not block:
            raise RequestError(f"block {number:#x} was given up while it waited for space")
        return block

    def _check_new(self, peer: Peer, number: int) -> None:
        if number in self._blocks or number >> 32 != peer.writer or peer not in self._peers:
            raise RequestError(f"block {number:#x} exists already, belongs to another writer, or its writer is gone")

    def _allocate(self, peer: Peer, number: int, nbytes: int, in_pieces: bool) -> StoredBlock | None:
        """Make a block in one piece, or else, with ``in_pieces``, in the largest holes. None: there is too little
        space."""
        self._check_new(peer, number)
        offset = self._extents.allocate(nbytes)
        if offset is not None:
            pieces: Pieces = ((offset, nbytes),)
        else:
            holes = self._extents.allocate_pieces(nbytes, _MOST_PIECES) if in_pieces else None
            if holes is None:
                return None
            pieces = tuple(holes)
        block = self._blocks[number] = StoredBlock(pieces, nbytes, peer)
        self._by_writer.setdefault(number >> 32, set()).add(number)
        self._holders.add(number >> 32, nbytes, self._peers[peer].name)
        self._peers[peer].unsealed.add(number)
        if self.spill is not None:
            self.spill.added(number, nbytes)
        return block

    async def _spill_one(self) -> bool:
        """Move the youngest block that nobody reads to the disk. False: there is none, or the disk takes no more."""
        if (spill := self.spill) is None:
            return False
        async with spill.moving:
            number = None if self._closed else spill.candidate(self._may_move)
            if number is None:
                return False
            block = self._blocks[number]
            lease = self._lease([block])
            try:
                moved = await spill.write(number, await self._whole(block), lambda: self._blocks.get(number) is block)
            finally:
                self._release(lease)
            if spill.has(number):
                self._hide(number)
                self._free(block.pieces)
                self._space.serve()
            return moved

    def _may_move(self, number: int) -> bool:
        block = self._blocks.get(number)
        return block is not None and block.sealed and not any(self._extents.is_leased(at) for at, _ in block.pieces)

    def _usage(self) -> str:
        stats = self._extents.stats()
        readers = [state.name for state in [*self._peers.values(), *self._ghosts] if state.leases]
        free = f", {stats.free} are free, {stats.largest_free} of them in the largest piece" if stats.free else ""
        holders = self._holders.describe(stats.leased_bytes, readers)
        return f"{stats.used} of {stats.capacity} bytes are used{free} ({holders})"

    # ----------------------------------------------------------------------------------------------------- lost clients

    def _bury(self, state: PeerState) -> None:
        """Nobody touches this client's memory any more: recycle it."""
        for lease in state.leases:
            self._extents.release(lease)
        for number in state.unsealed:
            block = self._blocks.pop(number, None)
            if block is not None:
                self._by_writer[number >> 32].discard(number)
                self._holders.remove(number >> 32, block.nbytes)
                self._give_back(number, block)
                if self._index is not None:
                    self._index.dropped(number)
        self._write_drops()
        self._space.serve()

    def _write_drops(self) -> None:
        if self._index is not None:
            try:
                self._index.write()
            except OSError as error:  # they are written with the next record
                self._context.log(f"the block index in {self._context.directory} takes no more: {error.strerror}")


async def open_store(context: StoreContext) -> MemoryStore:
    """Make the arena's file, or take up the one that was kept. Raises StartError."""
    if context.durability != "none":
        if context.settings.get("ssdOffload"):
            raise StartError(
                f"ssdOffload and durability {context.durability} exclude each other: blocks on the disk end with their "
                "storage unit; set durability to none or leave ssdOffload out"
            )
        return _open_kept(context)
    remove_abandoned(Path(context.directory))
    path = Path(context.directory) / f"tq-{context.name}-{os.getpid()}-{secrets.token_hex(4)}"
    table = table_bytes(context.capacity)
    file = ArenaFile(context.capacity, path, reserve=context.settings.get("reserve", False), table=table)
    if prefault := context.settings.get("prefault", True):
        file.start_prefault(most=None if prefault is True else prefault)
    try:
        return MemoryStore(context, file, spill=open_spill(context))
    except BaseException:
        file.close()
        raise


def _open_kept(context: StoreContext) -> MemoryStore:
    path = Path(context.directory) / f"{context.name}.arena"
    file = ArenaFile(context.capacity, path, keep=True, reserve=context.durability == "node")
    try:
        index = BlockIndex(
            path.with_suffix(".index"), context.capacity, secrets.token_hex(8), context.log, empty=file.is_new
        )
    except BaseException:
        file.close()
        raise
    store = MemoryStore(context, file, index)
    if context.settings.get("prefault", True):
        file.start_prefault()
    return store
