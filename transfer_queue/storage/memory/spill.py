"""Blocks on a local disk beyond the memory of a storage unit. Nothing unread is ever dropped.

When a put finds no room in the arena, the youngest blocks move to a file: rows are consumed about in the order in which
they came. A block that was moved is read from the file and sent to its reader; it does not come back into the arena.
The file has no name, so that it is gone with the process, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from transfer_queue.config.document import Bytes, Document, validate_document
from transfer_queue.config.processes import SMALLEST_CAPACITY
from transfer_queue.errors import StartError, StorageKeyNotFoundError
from transfer_queue.storage.base import StoreContext
from transfer_queue.storage.memory.extents import Extents
from transfer_queue.storage.memory.index import Pieces

__all__ = ["Spill", "SpillFile", "SpillSettings", "open_spill"]

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


class Spill:
    """The blocks of a store that are in a `SpillFile`, and those that may move there.

    Args:
        file: Where blocks move to.
        threshold: Smaller blocks stay in memory; bytes.
        log: Gets each new problem.
    """

    def __init__(self, file: SpillFile, threshold: int, log: Callable[[str], None]) -> None:
        self._file = file
        self._threshold = threshold
        self._log = log
        self._candidates: dict[int, None] = {}
        """Blocks in the arena that are long enough, the youngest last."""
        self._places: dict[int, _Place] = {}
        self.moving = asyncio.Lock()
        """Held while a block moves."""
        self.problem = ""
        """Why the latest block could not move."""

    def close(self) -> None:
        self._file.close()

    @property
    def blocks(self) -> int:
        """Number of blocks in the file."""
        return len(self._places)

    def added(self, block: int, nbytes: int) -> None:
        """The arena has a new block."""
        if nbytes >= self._threshold:
            self._candidates[block] = None

    def candidate(self, may_move: Callable[[int], bool]) -> int | None:
        """Return the youngest block in the arena that may move."""
        return next((block for block in reversed(self._candidates) if may_move(block)), None)

    def has_any(self, blocks: Iterable[int]) -> bool:
        """Return whether one of the blocks is in the file."""
        return not self._places.keys().isdisjoint(blocks)

    def has(self, block: int) -> bool:
        """Return whether the block is in the file."""
        return block in self._places

    async def write(self, block: int, data: memoryview, is_held: Callable[[], bool]) -> bool:
        """Copy a block into the file. ``is_held``: whether the store still holds the block after that.

        Returns False if there is no room: ``problem`` has the reason.
        """
        place = self._file.reserve(len(data))
        if place is None:
            self._report(f"ssdOffload.capacity of {self._file.folder} is used up; raise it")
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._file.write, place, data)
        except OSError as error:
            self._file.free(place)
            self._report(f"the disk of ssdOffload.path {self._file.folder} takes no more: {error.strerror}")
            return False
        self.problem = ""
        if is_held():
            del self._candidates[block]
            self._places[block] = place
        else:
            self._file.free(place)
        return True

    async def read(self, block: int) -> memoryview | None:
        """Return the bytes of a block in the file; None if it was freed meanwhile.

        Raises StorageKeyNotFoundError if the file cannot be read.
        """
        place = self._places[block]
        try:
            data = await asyncio.get_running_loop().run_in_executor(None, self._file.read, place)
        except OSError as error:
            raise StorageKeyNotFoundError(f"blocks cannot be read from {self._file.folder}: {error}") from error
        return data if self._places.get(block) is place else None

    def forget(self, block: int) -> bool:
        """The block was dropped. Returns whether it was in the file, where its space is free now."""
        self._candidates.pop(block, None)
        place = self._places.pop(block, None)
        if place is not None:
            self._file.free(place)
        return place is not None

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self._log(problem)
        self.problem = problem


def open_spill(context: StoreContext) -> Spill | None:
    """Return what ``ssdOffload`` of the settings asks for. Raises ConfigError, StartError."""
    if "ssdOffload" not in context.settings:
        return None
    settings = validate_document(SpillSettings, context.settings["ssdOffload"], "backend simple: ssdOffload")
    if not settings.enabled:
        return None
    if settings.path is None:
        raise StartError("ssdOffload.path: name a folder on a local disk")
    file = SpillFile(Path(settings.path), settings.capacity or _FILE_BYTES)
    return Spill(file, settings.threshold_bytes, context.log)
