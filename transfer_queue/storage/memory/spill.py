"""Blocks on a local disk beyond the memory of a storage unit. Nothing unread is ever dropped.

When a put finds no room in the arena, the youngest blocks move to a file: rows are consumed about in the order in which
they came. A block that was moved is read from the file and sent to its reader; it does not come back into the arena.
The file has no name, so that it is gone with the process, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from transfer_queue.config.document import Bytes, Document, validate_document
from transfer_queue.config.processes import SMALLEST_CAPACITY
from transfer_queue.errors import CapacityError, StartError, StorageKeyNotFoundError
from transfer_queue.storage.base import Peer, Served, StoreContext
from transfer_queue.storage.memory.arena import ArenaFile
from transfer_queue.storage.memory.extents import Extents
from transfer_queue.storage.memory.index import Pieces
from transfer_queue.storage.memory.unit import MemoryStore, _Block
from transfer_queue.wire import messages as wire

__all__ = ["SpillFile", "SpillSettings", "SpillingStore", "with_spill"]

_FILE_BYTES = 1 << 50
"""Offsets in the file; the disk is the limit."""


class SpillSettings(Document):
    """``ssdOffload`` of the simple backend."""

    enabled: bool = False
    path: str | None = None
    """A folder on a local disk; it is made if it is not there."""
    threshold_bytes: Bytes = Field(default=1 << 20, ge=0)
    """Smaller blocks stay in memory."""
    capacity: Bytes | None = Field(default=None, ge=SMALLEST_CAPACITY)
    """Most bytes in the file; null: as the disk has."""
    glibc_mmap_threshold_bytes: Bytes = Field(default=1 << 20, ge=0)
    """Accepted and without effect: blocks do not lie on the heap."""


_MOST_PIECES = 1 << 14


class _Place(NamedTuple):
    pieces: Pieces
    nbytes: int


class SpillFile:
    """A file without a name in ``folder``, of at most ``capacity`` bytes. ``write`` and ``read`` block and may run in
    any thread, one at a time each.

    Raises StartError if it cannot be made.
    """

    def __init__(self, folder: Path, capacity: int = _FILE_BYTES) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by close); mode 0600
        except OSError as error:
            raise StartError(f"ssdOffload.path: no file can be made in {folder}: {error.strerror}") from error
        self._extents = Extents(capacity)

    @property
    def used(self) -> int:
        """Bytes of the blocks in the file."""
        return self._extents.used

    def reserve(self, nbytes: int) -> _Place | None:
        """Allocate ``nbytes``, in one or several pieces; None if the capacity is exhausted."""
        pieces = self._extents.allocate_pieces(nbytes, _MOST_PIECES)
        return None if pieces is None else _Place(tuple(pieces), nbytes)

    def write(self, place: _Place, data: memoryview) -> None:
        """Raises OSError: the disk is full."""
        for offset, size in place.pieces:
            piece, data = data[:size], data[size:]
            done = 0
            while done < size:
                done += os.pwrite(self._file.fileno(), piece[done:], offset + done)

    def read(self, place: _Place) -> memoryview:
        """Raises OSError."""
        target = memoryview(bytearray(place.nbytes))
        left = target
        for offset, size in place.pieces:
            piece, left = left[:size], left[size:]
            done = 0
            while done < size:
                count = os.preadv(self._file.fileno(), [piece[done:]], offset + done)
                if count == 0:
                    raise OSError(f"the spill file ends before {offset + size}")
                done += count
        return target

    def free(self, place: _Place) -> None:
        for offset, _ in place.pieces:
            self._extents.free(offset)
        if not self._extents.used:
            os.ftruncate(self._file.fileno(), 0)  # give the disk back

    def close(self) -> None:
        self._file.close()


class SpillingStore(MemoryStore):
    """A MemoryStore whose arena is the first place for blocks, and a file the second."""

    def __init__(self, context: StoreContext, file: ArenaFile, spill: SpillFile, threshold: int) -> None:
        super().__init__(context, file)
        self._spill = spill
        self._threshold = threshold
        self._movable: dict[int, None] = {}
        """Blocks in the arena that are long enough, the youngest last."""
        self._moved: dict[int, _Place] = {}
        self._moving = asyncio.Lock()
        self._problem = ""

    async def close(self) -> None:
        async with self._moving:  # the arena is not unmapped under a write
            await super().close()
            self._spill.close()

    # ---------------------------------------------------------------------------------------------------------- writing

    def _add(self, peer: Peer, number: int, pieces: Pieces, nbytes: int) -> _Block:
        block = super()._add(peer, number, pieces, nbytes)
        if nbytes >= self._threshold:
            self._movable[number] = None
        return block

    def _give_back(self, number: int, block: _Block) -> None:
        self._movable.pop(number, None)
        place = self._moved.pop(number, None)
        if place is None:
            super()._give_back(number, block)
        else:
            self._spill.free(place)

    async def _wait_for_space(self, peer: Peer, nbytes: int, wait_s: float, in_pieces: bool) -> Pieces:
        while nbytes <= self._extents.capacity:
            pieces = self._allocate(nbytes, in_pieces)
            if pieces is not None:
                return pieces
            if not await self._move_one():
                break
        try:
            return await super()._wait_for_space(peer, nbytes, wait_s, in_pieces)
        except CapacityError as error:
            raise CapacityError(f"{error}; {self._problem}" if self._problem else str(error)) from None

    async def _move_one(self) -> bool:
        """Move the youngest block that nobody reads to the file. False: there is none, or the disk is full."""
        async with self._moving:
            if self._closed:
                return False
            number = next((each for each in reversed(self._movable) if self._may_move(each)), None)
            if number is None:
                return False
            block = self._blocks[number]
            place = self._spill.reserve(block.nbytes)
            if place is None:
                self._report(f"ssdOffload.capacity of {self._spill.folder} is used up; raise it")
                return False
            lease = self._lease([block])
            data = await self._whole(block)
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._spill.write, place, data)
            except OSError as error:
                self._spill.free(place)
                self._report(f"the disk of ssdOffload.path {self._spill.folder} takes no more: {error.strerror}")
                return False
            finally:
                data.release()
                self._release(lease)
            self._problem = ""
            if self._blocks.get(number) is not block:  # freed while it was written
                self._spill.free(place)
                return True
            del self._movable[number]
            self._moved[number] = place
            self._free(block.pieces)
            self._serve_waiters()
            return True

    def _may_move(self, number: int) -> bool:
        block = self._blocks.get(number)
        return block is not None and block.sealed and not any(map(self._extents.is_leased, block.offsets))

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._context.log(problem)
        self._problem = problem

    # ---------------------------------------------------------------------------------------------------------- reading

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        if isinstance(message, wire.Open) and not self._moved.keys().isdisjoint(message.blocks):
            return self._open_moved(message)
        if isinstance(message, wire.Read) and not self._moved.keys().isdisjoint(part.block for part in message.parts):
            return self._read_copied(message)
        return super().serve(peer, message, payload)

    async def _open_moved(self, message: wire.Open) -> Served:
        """All of the blocks are sent, those in the arena as well: the reader expects them in one place."""
        data, lease = await self._bytes_of(message.blocks)
        places = itertools.accumulate((len(each) for each in data[:-1]), initial=0)
        extents = [(place, len(each)) for place, each in zip(places, data, strict=True)]
        return Served(wire.Extents(0, extents), data, lambda: self._release(lease))

    async def _bytes_of(self, numbers: Sequence[int]) -> tuple[list[memoryview], int]:
        """All bytes of each block in one piece, and a lease on the blocks in the arena."""
        blocks = [self._readable(number) for number in numbers]
        places = [self._moved.get(number) for number in numbers]
        lease = self._lease(block for block, place in zip(blocks, places, strict=True) if place is None)
        loop = asyncio.get_running_loop()
        data = []
        try:
            for number, block, place in zip(numbers, blocks, places, strict=True):
                if place is None:
                    data.append(await self._whole(block))
                    continue
                data.append(await loop.run_in_executor(None, self._spill.read, place))
                if self._moved.get(number) is not place:  # freed meanwhile, and perhaps overwritten
                    raise StorageKeyNotFoundError(f"block {number:#x} is gone from storage unit {self._context.name}")
        except OSError as error:
            self._release(lease)
            raise StorageKeyNotFoundError(f"blocks cannot be read from {self._spill.folder}: {error}") from error
        except BaseException:
            self._release(lease)
            raise
        return data, lease


def with_spill(context: StoreContext, file: ArenaFile) -> MemoryStore:
    """The store for an arena, as ``ssdOffload`` of the settings says. Raises ConfigError, StartError."""
    try:
        settings = validate_document(SpillSettings, context.settings["ssdOffload"], "backend simple: ssdOffload")
        if not settings.enabled:
            return MemoryStore(context, file)
        if settings.path is None:
            raise StartError("ssdOffload.path: name a folder on a local disk")
        spill = SpillFile(Path(settings.path), settings.capacity or _FILE_BYTES)
    except BaseException:
        file.close()
        raise
    return SpillingStore(context, file, spill, settings.threshold_bytes)
