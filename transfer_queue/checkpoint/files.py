"""The files of a checkpoint, see docs/checkpoint.md. The last write, that of ``metadata.json``, makes one valid."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from transfer_queue.checkpoint.directory import MANIFEST, PART, CheckpointDirectory
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

__all__ = [
    "FORMAT",
    "ROWS",
    "BlockPlace",
    "FileEntry",
    "Manifest",
    "Progress",
    "Writer",
    "read_manifest",
]

FORMAT = 1
_FILE_BYTES = 1 << 30
"""A file of blocks is followed by another one from this size on."""
_DATA_FOLDER = re.compile(r"data-[0-9a-f]{8}")
ROWS = "rows.msgpack"
"""What a dump of rows by key has in place of the state of the controller."""
Progress = Callable[[int, int], None]
"""Called with the bytes of blocks that are done, and of all."""


class FileEntry(msgspec.Struct, frozen=True):
    """``crc32`` None: a file of blocks; each block has its own checksum."""

    bytes: int
    crc32: int | None = None


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Return the place of the block of slot ``slot`` of the state."""

    slot: int
    file: int
    offset: int
    nbytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``metadata.json``. ``files``: what else there is in folder ``data``."""

    format: int
    data: str
    storage_saved: bool
    user_metadata: dict[str, Any]
    rows: int
    partitions: int
    files: dict[str, FileEntry]
    crc32: int = 0
    """Checksum of this manifest, with 0 here, as compact JSON."""

    @property
    def nbytes(self) -> int:
        """Size of all files except ``metadata.json``."""
        return sum(entry.bytes for entry in self.files.values())

    def checksum(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, crc32=0), order="deterministic"))


def read_manifest(directory: CheckpointDirectory) -> Manifest:
    """The manifest, once every file that it lists was found with its size.

    Raises CheckpointNotFoundError, CorruptCheckpointError, CheckpointError, OSError.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        manifest = msgspec.json.decode(directory.read(MANIFEST), type=Manifest)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"checkpoint not found: there is no {path}") from None
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is not that of a checkpoint of this release, or damaged: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads {FORMAT}")
    if manifest.checksum() != manifest.crc32:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum differs")
    if not _DATA_FOLDER.fullmatch(manifest.data):
        raise CorruptCheckpointError(f"{path} is damaged: {manifest.data!r} is not a valid name of a data folder")
    for name, entry in manifest.files.items():
        if not PART.fullmatch(name):
            raise CorruptCheckpointError(f"{path} is damaged: {name!r} is not a valid name of a part")
        part = f"{manifest.data}/{name}"
        try:
            size = directory.size(part)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"part of the checkpoint not found: there is no {directory}/{part}") from None
        if size != entry.bytes:
            raise CorruptCheckpointError(f"{directory}/{part} is damaged: it has {size} bytes instead of {entry.bytes}")
    return manifest


def check_not_foreign(directory: CheckpointDirectory, *, rows: bool = False) -> None:
    """Raises CheckpointError if ``metadata.json`` does not belong to a checkpoint, or with ``rows`` to a dump of rows.
    An unreadable file counts as a damaged one if a save left a folder of data beside it."""
    try:
        about = json.loads(directory.read(MANIFEST))
    except FileNotFoundError:
        return
    except ValueError:
        about = {"storage_saved"} if directory.was_saved_to() else None
    if not isinstance(about, dict | set) or "storage_saved" not in about:  # releases 0.1.x wrote that, too
        raise CheckpointError(
            f"{directory}/{MANIFEST} does not belong to a checkpoint, and would be lost; save elsewhere"
        )
    files = about.get("files") if isinstance(about, dict) else None
    if isinstance(files, dict) and (ROWS in files) != rows:
        what = "a whole queue" if rows else "rows by key"
        raise CheckpointError(f"{directory} has a checkpoint of {what}, which would be lost; save elsewhere")


def read_file(directory: CheckpointDirectory, manifest: Manifest, name: str) -> bytes:
    """A whole file, checked. Raises CorruptCheckpointError, OSError."""
    entry = manifest.files.get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{directory}/{MANIFEST} is damaged: it does not list {name}")
    content = directory.read(f"{manifest.data}/{name}")
    if zlib.crc32(content) != entry.crc32:
        raise CorruptCheckpointError(f"{directory}/{manifest.data}/{name} is damaged: its checksum differs")
    return content


class Writer:
    """Writes a checkpoint beside the one that may be there; ``commit`` replaces it, atomically."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._id = secrets.token_hex(4)
        self._folder = directory.begin(self._id)
        self._files: dict[str, FileEntry] = {}
        self._open = contextlib.ExitStack()
        """The file of blocks that is being written."""
        self._blocks: BinaryIO | None = None
        self._number = -1
        self._size = 0

    def add_block(self, slot: int, segments: Sequence[memoryview]) -> BlockPlace:
        """Append a block's bytes."""
        if self._blocks is None or self._size >= _FILE_BYTES:
            self._end_blocks()
            self._number += 1
            self._blocks = self._open.enter_context(
                self._directory.write(f"{self._folder}/{blocks_name(self._number)}")
            )
        offset, crc = self._size, 0
        for segment in segments:
            self._blocks.write(segment)
            crc = zlib.crc32(segment, crc)
            self._size += segment.nbytes
        return BlockPlace(slot, self._number, offset, self._size - offset, crc)

    def add_file(self, name: str, content: bytes) -> None:
        with self._directory.write(f"{self._folder}/{name}") as file:
            file.write(content)
        self._files[name] = FileEntry(len(content), zlib.crc32(content))

    def commit(self, **about: Any) -> Manifest:
        """Make it the checkpoint of the directory. ``about``: the further fields of the manifest."""
        self._end_blocks()
        manifest = Manifest(format=FORMAT, data=f"data-{self._id}", files=self._files, **about)
        manifest = msgspec.structs.replace(manifest, crc32=manifest.checksum())
        former = _listed(self._directory)
        self._directory.publish(self._id, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
        for folder in {*former, *self._directory.abandoned()} - {manifest.data}:
            self._directory.remove(folder)
        return manifest

    def abandon(self) -> None:
        """Give up; what was there before stays."""
        with contextlib.suppress(OSError):
            self._open.close()
        self._directory.remove(self._folder)

    def _end_blocks(self) -> None:
        self._open.close()
        if self._blocks is not None:
            self._blocks = None
            self._files[blocks_name(self._number)] = FileEntry(self._size)
            self._size = 0


def _listed(directory: CheckpointDirectory) -> set[str]:
    """The folder of data that the manifest of ``directory`` lists, if it is whole."""
    with contextlib.suppress(OSError, CheckpointError):
        return {read_manifest(directory).data}
    return set()


def blocks_name(number: int) -> str:
    """Name of a file of blocks within the folder of data."""
    return f"blocks-{number:05d}"
