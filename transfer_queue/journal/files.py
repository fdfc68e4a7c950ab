"""The files of a journal, byte by byte. Pure but for reading the file it is given.

::

    segment-%016x    header, then frames, each one batch of a group commit
    snapshot-%016x   header, then one frame: the state before the segment of the same number

    header   magic 8 bytes, number u64, bytes of the segment before u64, CRC-32 of these u32
    frame    payload length u64, CRC-32 of the payload u32, CRC-32 of these two u32, payload

All little-endian. An append that a crash cut short leaves a prefix of its frame, or zeros where the file system had
given it room but no bytes yet. Anything else that does not match its checksum was damaged after it was written.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from transfer_queue.config.ownership import open_checked
from transfer_queue.errors import CorruptJournalError

Buffer = bytes | bytearray | memoryview

__all__ = [
    "HEADER_BYTES",
    "Header",
    "SegmentReader",
    "frame",
    "magic",
    "numbered",
    "pack_header",
    "read_header",
    "unfinished",
]

Kind = Literal["segment", "snapshot"]
_MAGIC: Final[dict[Kind, bytes]] = {"segment": b"TQJOURN1", "snapshot": b"TQSNAPS1"}
_HEADER = struct.Struct("<8sQQ")
_FRAME = struct.Struct("<QI")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
FRAME_BYTES: Final = _FRAME.size + _CRC.size
_ZEROS_READ: Final = 1 << 20
_NAME = re.compile(r"(segment|snapshot)-([0-9a-f]{16})")


class Header(NamedTuple):
    number: int
    previous_bytes: int
    """Length of the segment before this one when it was finished; 0 if there is none."""


def numbered(folder: Path, kind: Kind) -> dict[int, Path]:
    """The files of this kind by number, ascending."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return dict(sorted((int(match[2], 16), path) for match, path in found if match[1] == kind))


def unfinished(folder: Path) -> list[Path]:
    """Snapshots that a crash cut short."""
    return [path for path in folder.glob("snapshot-*.new") if _NAME.fullmatch(path.stem)]


def magic(kind: Kind) -> bytes:
    """The bytes at the start of a file of this kind."""
    return _MAGIC[kind]


def pack_header(kind: Kind, header: Header) -> bytes:
    raw = _HEADER.pack(_MAGIC[kind], *header)
    return raw + _CRC.pack(zlib.crc32(raw))


def frame(payload: Sequence[Buffer]) -> list[Buffer]:
    """What to write for a batch, as buffers that need not be joined."""
    crc = 0
    for part in payload:
        crc = zlib.crc32(part, crc)
    head = _FRAME.pack(sum(map(len, payload)), crc)
    return [head + _CRC.pack(zlib.crc32(head)), *payload]


def read_header(file: BinaryIO, path: Path, kind: Kind) -> Header | None:
    """The header at the start of ``file``; None if a crash cut it short. Raises CorruptJournalError."""
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or not any(raw):
        return None
    begin, *numbers = _HEADER.unpack_from(raw)
    if _CRC.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]) or begin != _MAGIC[kind]:
        raise corrupt(path, 0, f"the header is not that of a {kind}, or it was damaged")
    return Header(*numbers)


def corrupt(path: Path, offset: int, what: str) -> CorruptJournalError:
    return CorruptJournalError(
        f"journal file {path} at byte {offset}: {what}. Restore the folder {path.parent} from a copy, or move it away "
        "to start with an empty queue"
    )


class SegmentReader:
    """Batches of one file. ``end``: where the last whole one ends, once they have all been read."""

    def __init__(self, path: Path, kind: Kind = "segment") -> None:
        self.path = path
        self.kind: Kind = kind
        self.header: Header | None = None
        self.torn = False
        """Whether bytes follow ``end`` that a crash left."""
        self.end = 0

    def batches(self) -> Iterator[bytes]:
        """Raises CorruptJournalError naming file and byte for anything that a cut-short append cannot explain, and
        StartError for a file that another user may have left."""
        with open(open_checked(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self.header = read_header(file, self.path, self.kind)
            if self.header is None:
                self.torn = size > 0
                return
            self.end = HEADER_BYTES
            while self.end < size:
                payload = self._next(file, size)
                if payload is None:
                    self.torn = True
                    return
                self.end = file.tell()
                yield payload

    def _next(self, file: BinaryIO, size: int) -> bytes | None:
        head = file.read(FRAME_BYTES)
        if len(head) < FRAME_BYTES:
            return None
        length, crc = _FRAME.unpack_from(head)
        if _CRC.unpack_from(head, _FRAME.size)[0] != zlib.crc32(head[: _FRAME.size]):
            if not any(head) and _only_zeros(file):
                return None
            raise corrupt(self.path, self.end, "the head of a batch does not match its checksum")
        if length > size - file.tell():
            return None
        payload = file.read(length)
        if zlib.crc32(payload) != crc:
            raise corrupt(self.path, self.end, f"a batch of {length} bytes does not match its checksum")
        return payload


def _only_zeros(file: BinaryIO) -> bool:
    while chunk := file.read(_ZEROS_READ):
        if any(chunk):
            return False
    return True
