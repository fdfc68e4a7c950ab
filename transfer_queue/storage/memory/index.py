"""Which blocks lie where in an arena that outlives its unit: a log of small records beside the arena.

::

    header    magic 8 bytes, life u64, capacity u64, incarnation 16 bytes, CRC-32 of these u32
    record    what happened u8, scope u24, block u64, offset u64, bytes u64, CRC-32 of these u32    (32 bytes)
              offset 0: the block lies in the pieces that its latest records of kind 5 name, in their order
    or        4 u8, scope u24, bytes of its name u32, place in it u32, 16 bytes of it, CRC-32 of these u32    (32 bytes)

All little-endian. A scope is the partition that a block belongs to, where storage units keep tenants apart; else it is
0. A record that a crash cut short was never acknowledged. The log is rewritten at each start and
whenever most of it is history.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from transfer_queue.config.ownership import open_checked, open_own
from transfer_queue.errors import StartError

__all__ = ["BlockIndex", "Pieces", "Place"]

_MAGIC: Final = b"TQARENA3"
_HEADER = struct.Struct("<8sQQ16s")
_RECORD = struct.Struct("<IQQQ")
_NAME = struct.Struct("<III16s")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
RECORD_BYTES: Final = _RECORD.size + _CRC.size
_ALLOCATED, _SEALED, _DROPPED, _SCOPE, _IN_PIECES = 1, 2, 3, 4, 5
_PIECE: Final = 16
_HISTORY: Final = 4096
"""Number of outdated records from which on the log is rewritten."""


Pieces = tuple[tuple[int, int], ...]
"""The pieces of a block as (offset, bytes); most blocks have one."""


class Place(NamedTuple):
    pieces: Pieces
    sealed: bool
    """True if the block was acknowledged; else somebody may have been writing it."""
    scope: str = ""

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.pieces)


class BlockIndex:
    """The log at ``path`` of an arena of ``capacity`` bytes. It is made with ``incarnation`` if it is absent, or if the
    arena is new (``empty``) and the log belongs to an earlier arena.

    ``blocks``: what it says. ``life``: how often it was opened. Records whose checksum is wrong are left out and
    reported with ``log``; so are blocks whose place was given to later ones. Raises StartError if the file cannot be
    used, is of another capacity, or its header is damaged.
    """

    def __init__(
        self, path: Path, capacity: int, incarnation: str, log: Callable[[str], None], *, empty: bool = False
    ) -> None:
        self.path = path
        self.incarnation = incarnation
        """16 hexadecimal digits."""
        self.life = 0
        self.blocks: dict[int, Place] = {}
        self._capacity = capacity
        self._scopes: dict[str, int] = {"": 0}
        """Numbers of the names in the file."""
        self._pending: list[bytes] = []
        self._records = 0
        self._needed = 0
        """Number of records that the present blocks need, without names."""
        self._length = 0
        self._file = -1
        try:
            if path.exists():
                self._load(self._content(empty), log)
            self._needed = sum(map(_count, self.blocks.values()))
            self.life += 1
            self._rewrite()
        except OSError as error:
            raise StartError(f"cannot use the block index {path}: {error.strerror}; give another directory") from None

    # --------------------------------------------------------------------------------------------------------- loading

    def _content(self, empty: bool) -> bytes:
        """The content of the file; empty if the file is to be replaced."""
        with open(open_checked(self.path), "rb") as stream:
            data = stream.read()
        if not empty:
            return data
        if not _MAGIC.startswith(data[: len(_MAGIC)]):
            raise StartError(f"{self.path} is not a block index of this version; move it away to start empty")
        return b""

    def _load(self, data: bytes, log: Callable[[str], None]) -> None:
        if not data:
            return
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
        pieces: dict[int, dict[int, bytes]] = {}
        lengths = {0: 0}
        scope_of: dict[int, int] = {}
        in_pieces: dict[int, list[tuple[int, int]]] = {}
        for start in range(HEADER_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
            raw = data[start : start + RECORD_BYTES]
            what, block, offset, nbytes = _RECORD.unpack_from(raw)
            if _CRC.unpack_from(raw, _RECORD.size)[0] != zlib.crc32(raw[: _RECORD.size]):
                damaged += 1
                continue
            what, scope = what & 0xFF, what >> 8
            if what == _SCOPE:
                _, lengths[scope], place, piece = _NAME.unpack_from(raw)
                pieces.setdefault(scope, {})[place] = piece
                continue
            if what == _IN_PIECES:
                in_pieces.setdefault(block, []).append((offset, nbytes))
                continue
            self.blocks.pop(block, None)
            if what == _DROPPED:
                continue
            found = ((offset, nbytes),) if offset else _latest(in_pieces.pop(block, []), nbytes)
            if sum(size for _, size in found) != nbytes:
                damaged += 1  # of one of its pieces
                continue
            self.blocks[block] = Place(found, what == _SEALED)
            scope_of[block] = scope
        nameless = self._name_scopes(scope_of, {n: _join(pieces.get(n, {}), size) for n, size in lengths.items()})
        if damaged:
            count = len(self.blocks)
            self._drop_overlaid()
            log(
                f"{damaged} records of the block index {self.path} are damaged: their blocks are lost"
                + (f", {count - len(self.blocks)} others were overwritten" if count > len(self.blocks) else "")
                + (f", {nameless} are readable with the partition prefix '' only" if nameless else "")
            )

    def _name_scopes(self, scope_of: dict[int, int], names: dict[int, str | None]) -> int:
        """Returns how many blocks belong to a scope whose name is damaged; they are left without one."""
        nameless = 0
        for block, place in self.blocks.items():
            name = names.get(scope_of[block])
            nameless += name is None
            self.blocks[block] = place._replace(scope=name or "")
        return nameless

    def _drop_overlaid(self) -> None:
        """Of blocks that overlap the latest is true: the record that freed the earlier one's place is damaged."""
        taken: list[tuple[int, int]] = []

        def overlaps(span: tuple[int, int]) -> bool:
            at = bisect_left(taken, span)
            return bool((at and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1]))

        for block, place in reversed(list(self.blocks.items())):
            spans = [(offset, offset + nbytes) for offset, nbytes in place.pieces]
            if any(map(overlaps, spans)):
                del self.blocks[block]
            else:
                for span in spans:
                    insort(taken, span)

    # --------------------------------------------------------------------------------------------------------- writing

    def allocated(self, block: int, pieces: Pieces, scope: str = "") -> None:
        """Somebody is about to write the block in place. Raises OSError."""
        self._note(block, Place(pieces, False, scope))

    def sealed(self, block: int, pieces: Pieces, scope: str = "") -> None:
        """The block is whole; returns once that survives the end of this process. Raises OSError."""
        self._note(block, Place(pieces, True, scope))

    def dropped(self, block: int) -> None:
        """The block is gone. Written with the next record, or by `write`."""
        before = self.blocks.pop(block, None)
        if before is not None:
            self._needed -= _count(before)
            self._pending.append(_record(_DROPPED, block, 0, 0))

    def write(self) -> None:
        """Write what is pending. Raises OSError, and then all of it is still pending."""
        if not self._pending:
            return
        if self._records + len(self._pending) > _HISTORY + 4 * self._needed:
            self._rewrite()
            return
        data = b"".join(self._pending)
        try:
            _write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, self._length)  # part of a record would make those after it unreadable
            raise
        self._length += len(data)
        self._records += len(self._pending)
        self._pending.clear()

    def sync(self) -> None:
        """Return once all that was written is on the disk. Raises OSError. May run in another thread."""
        file = self._file
        try:
            os.fdatasync(file)
        except OSError:
            if file == self._file:
                raise  # else the log was rewritten meanwhile, and is on the disk

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _note(self, block: int, place: Place) -> None:
        before = self.blocks.get(block)
        self._needed += _count(place) - (_count(before) if before else 0)
        self.blocks[block] = place
        self._pending += _records(block, place, self._scopes)
        self.write()

    def _rewrite(self) -> None:
        scopes = {"": 0}
        records = [record for block, place in self.blocks.items() for record in _records(block, place, scopes)]
        fresh = self.path.with_suffix(".new")
        head = _HEADER.pack(_MAGIC, self.life, self._capacity, self.incarnation.encode("ascii"))
        file = open_own(fresh, _MAGIC)
        try:
            _write_all(file, head + _CRC.pack(zlib.crc32(head)) + b"".join(records))
            os.fdatasync(file)
            fresh.rename(self.path)
        except OSError:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        self.close()
        self._file = file
        self._length = HEADER_BYTES + RECORD_BYTES * len(records)
        self._records = len(records)
        self._scopes = scopes
        self._pending.clear()


def _records(block: int, place: Place, scopes: dict[str, int]) -> list[bytes]:
    """The record of a block, after those of its scope if that is not one of ``scopes`` yet."""
    records = []
    if place.scope not in scopes:
        scopes[place.scope] = len(scopes)
        name = place.scope.encode("utf-8", "surrogatepass")
        what = _SCOPE | scopes[place.scope] << 8
        for start in range(0, len(name), _PIECE):
            records.append(_checked(_NAME.pack(what, len(name), start, name[start : start + _PIECE])))
    what = (_SEALED if place.sealed else _ALLOCATED) | scopes[place.scope] << 8
    (offset, nbytes), *more = place.pieces
    if more:
        records += [_record(_IN_PIECES, block, *piece) for piece in place.pieces]
        offset, nbytes = 0, place.nbytes
    records.append(_record(what, block, offset, nbytes))
    return records


def _count(place: Place) -> int:
    """Number of records of a place."""
    return len(place.pieces) + (len(place.pieces) > 1)


def _latest(pieces: list[tuple[int, int]], nbytes: int) -> Pieces:
    """The last of ``pieces`` with ``nbytes`` in total; earlier pieces belong to a damaged record."""
    found: list[tuple[int, int]] = []
    while pieces and nbytes > 0:
        found.append(pieces.pop())
        nbytes -= found[-1][1]
    return tuple(reversed(found))


def _record(what: int, block: int, offset: int, nbytes: int) -> bytes:
    return _checked(_RECORD.pack(what, block, offset, nbytes))


def _checked(raw: bytes) -> bytes:
    return raw + _CRC.pack(zlib.crc32(raw))


def _join(pieces: dict[int, bytes], length: int) -> str | None:
    """The name of a scope; None if a piece is missing."""
    name = b"".join(pieces.get(start, b"") for start in range(0, length, _PIECE))
    return name[:length].decode("utf-8", "surrogatepass") if len(name) >= length else None


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        written = os.write(file, left)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[written:]
