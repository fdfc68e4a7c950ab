"""Which blocks lie where in an arena that outlives its unit: a log of small records beside the arena.

::

    header    magic 8 bytes, life u64, capacity u64, incarnation 16 bytes, CRC-32 of these u32
    record    what happened u32, block u64, offset u64, bytes u64, CRC-32 of these u32    (32 bytes)

All little-endian. A record that a crash cut short is of something that nobody was told. The log is written anew at each
start and whenever most of it is history.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from transfer_queue.errors import StartError

__all__ = ["BlockIndex", "Place"]

_MAGIC: Final = b"TQARENA1"
_HEADER = struct.Struct("<8sQQ16s")
_RECORD = struct.Struct("<IQQQ")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
RECORD_BYTES: Final = _RECORD.size + _CRC.size
_ALLOCATED, _SEALED, _DROPPED = 1, 2, 3
_HISTORY: Final = 4096
"""Records that may be out of date before writing the log anew is considered."""


class Place(NamedTuple):
    offset: int
    nbytes: int
    sealed: bool
    """Whether the block was acknowledged; else somebody may have been writing it."""


class BlockIndex:
    """The log at ``path`` of an arena of ``capacity`` bytes, made with ``incarnation`` if it is absent.

    ``blocks``: what it says. ``life``: how often it was opened. Records whose checksum is wrong are left out and
    reported with ``log``; so are blocks whose place was given to later ones. Raises StartError if the file cannot be
    used, is of another capacity, or its header is damaged.
    """

    def __init__(self, path: Path, capacity: int, incarnation: str, log: Callable[[str], None]) -> None:
        self.path = path
        self.incarnation = incarnation
        """16 hexadecimal digits."""
        self.life = 0
        self.blocks: dict[int, Place] = {}
        self._capacity = capacity
        self._pending: list[bytes] = []
        self._records = 0
        self._file = -1
        try:
            if path.exists():
                self._load(path.read_bytes(), log)
            self.life += 1
            self._rewrite()
        except OSError as error:
            raise StartError(f"cannot use the block index {path}: {error.strerror}; give another directory") from None

    # --------------------------------------------------------------------------------------------------------- loading

    def _load(self, data: bytes, log: Callable[[str], None]) -> None:
        advice = f"remove {self.path} and the arena beside it to start empty"
        head = data[:HEADER_BYTES]
        if len(head) < HEADER_BYTES or _CRC.unpack_from(head, _HEADER.size)[0] != zlib.crc32(head[: _HEADER.size]):
            raise StartError(f"the header of the block index {self.path} is damaged; {advice}")
        magic, life, capacity, incarnation = _HEADER.unpack_from(head)
        if magic != _MAGIC:
            raise StartError(f"{self.path} is not a block index of this version; {advice}")
        if capacity != self._capacity:
            raise StartError(
                f"the arena of {self.path} has a capacity of {capacity} bytes, not {self._capacity}; set it back, or "
                f"{advice}"
            )
        self.life, self.incarnation = life, incarnation.decode("ascii")
        damaged = 0
        for start in range(HEADER_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
            raw = data[start : start + RECORD_BYTES]
            what, block, offset, nbytes = _RECORD.unpack_from(raw)
            if _CRC.unpack_from(raw, _RECORD.size)[0] != zlib.crc32(raw[: _RECORD.size]):
                damaged += 1
                continue
            self.blocks.pop(block, None)
            if what != _DROPPED:
                self.blocks[block] = Place(offset, nbytes, what == _SEALED)
        if damaged:
            before = len(self.blocks)
            self._drop_overlaid()
            log(
                f"{damaged} records of the block index {self.path} are damaged: their blocks are lost"
                + (f", {before - len(self.blocks)} others were overwritten" if before > len(self.blocks) else "")
            )

    def _drop_overlaid(self) -> None:
        """Of blocks that overlap the latest is true: the record that freed the earlier one's place is damaged."""
        taken: list[tuple[int, int]] = []
        for block, place in reversed(list(self.blocks.items())):
            span = (place.offset, place.offset + place.nbytes)
            at = bisect_left(taken, span)
            if (at and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1]):
                del self.blocks[block]
            else:
                insort(taken, span)

    # --------------------------------------------------------------------------------------------------------- writing

    def allocated(self, block: int, offset: int, nbytes: int) -> None:
        """Somebody is about to write the block in place."""
        self._note(_ALLOCATED, block, Place(offset, nbytes, False))
        self.write()

    def sealed(self, block: int, offset: int, nbytes: int) -> None:
        """The block is whole; returns once that survives the end of this process. Raises OSError."""
        self._note(_SEALED, block, Place(offset, nbytes, True))
        self.write()

    def dropped(self, block: int) -> None:
        """The block is gone. Written with the next record, or by `write`."""
        if self.blocks.pop(block, None) is not None:
            self._pending.append(_record(_DROPPED, block, 0, 0))

    def write(self) -> None:
        """Write what is pending. Raises OSError."""
        pending, self._pending = self._pending, []
        if pending:
            self._records += len(pending)
            if self._records > _HISTORY + 4 * len(self.blocks):
                self._rewrite()
            else:
                os.write(self._file, b"".join(pending))

    def sync(self) -> None:
        """Return once all that was written is on the disk. Raises OSError. May run in another thread."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _note(self, what: int, block: int, place: Place) -> None:
        self.blocks[block] = place
        self._pending.append(_record(what, block, place.offset, place.nbytes))

    def _rewrite(self) -> None:
        fresh = self.path.with_suffix(".new")
        head = _HEADER.pack(_MAGIC, self.life, self._capacity, self.incarnation.encode("ascii"))
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, head + _CRC.pack(zlib.crc32(head)) + b"".join(_records(self.blocks.items())))
            os.fdatasync(file)
            fresh.rename(self.path)
        except OSError:
            os.close(file)
            raise
        self.close()
        self._file = file
        self._records = len(self.blocks)


def _record(what: int, block: int, offset: int, nbytes: int) -> bytes:
    raw = _RECORD.pack(what, block, offset, nbytes)
    return raw + _CRC.pack(zlib.crc32(raw))


def _records(blocks: Iterable[tuple[int, Place]]) -> Iterable[bytes]:
    for block, place in blocks:
        yield _record(_SEALED if place.sealed else _ALLOCATED, block, place.offset, place.nbytes)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
