"""The files of a checkpoint, see docs/checkpoint.md. The last write, that of ``metadata.json``, makes one valid."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec

from transfer_queue.checkpoint.directory import MANIFEST, PART, CheckpointDirectory
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

__all__ = [
    "FORMAT",
    "ROWS",
    "BlockPlace",
    "BorrowedFile",
    "FileEntry",
    "Manifest",
    "Progress",
    "Writer",
    "decode_manifest",
    "read_manifest",
]

FORMAT = 2
"""Format of a checkpoint with blocks in files of earlier ones. Others have format 1, which earlier releases read."""
_FILE_BYTES = 1 << 30
"""A file of blocks is followed by another one from this size on."""
_DATA_FOLDER = re.compile(r"data-[0-9a-f]{8}")
_BORROWED = re.compile(r"(\.\./[0-9]{8}T[0-9]{6}Z/)?data-[0-9a-f]{8}/blocks-[0-9]{5,}")
_MOST_SLOTS = 1 << 31
ROWS = "rows.msgpack"
"""What a dump of rows by key has in place of the state of the controller."""
Progress = Callable[[int, int], None]
"""Called with the bytes of blocks that are done, and of all."""


class FileEntry(msgspec.Struct, frozen=True):
    """``crc32`` None: a file of blocks; each block has its own checksum."""

    bytes: int
    crc32: int | None = None


class BorrowedFile(msgspec.Struct, frozen=True):
    """A file of blocks that an earlier checkpoint in the same directory, or of the same series, wrote.

    ``path`` is relative to the directory of the checkpoint, ``bytes`` is the size of the file, and ``used`` that of the
    blocks in it that belong to this checkpoint.
    """

    path: str
    bytes: int
    used: int


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of the block of slot ``slot`` of the state.

    ``file`` is the number of a file of this checkpoint, or -1 - n for the borrowed file n. Blocks with the same
    ``identity`` have the same bytes; without one, nothing is known.
    """

    slot: int
    file: int
    offset: int
    nbytes: int
    crc32: int
    identity: bytes = b""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``metadata.json``. ``files``: what else there is in folder ``data``. ``borrowed``: files of earlier ones."""

    format: int
    data: str
    storage_saved: bool
    user_metadata: dict[str, Any]
    rows: int
    partitions: int
    files: dict[str, FileEntry]
    crc32: int
    """Checksum of this manifest, with 0 here, as compact JSON."""
    borrowed: list[BorrowedFile] = []

    @property
    def written(self) -> int:
        """Bytes that the save wrote, except ``metadata.json``."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all that belongs to it, except ``metadata.json``."""
        return self.written + sum(file.used for file in self.borrowed)

    def path_of(self, file: int) -> str:
        """The path of a file of blocks by its number in a BlockPlace."""
        return f"{self.data}/{blocks_name(file)}" if file >= 0 else self.borrowed[-1 - file].path

    def sizes(self) -> dict[str, int]:
        """Path -> size of each file that it needs."""
        own = {f"{self.data}/{name}": entry.bytes for name, entry in self.files.items()}
        return own | {file.path: file.bytes for file in self.borrowed}

    def checksum(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, crc32=0), order="deterministic"))


def decode_manifest(directory: CheckpointDirectory) -> Manifest:
    """The manifest. The files that it names may be missing.

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
    if not 1 <= manifest.format <= FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads 1 to {FORMAT}")
    if manifest.checksum() != manifest.crc32:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum differs")
    if not _DATA_FOLDER.fullmatch(manifest.data):
        raise CorruptCheckpointError(f"{path} is damaged: {manifest.data!r} is not a valid name of a data folder")
    for name in manifest.files:
        if not PART.fullmatch(name):
            raise CorruptCheckpointError(f"{path} is damaged: {name!r} is not a valid name of a part")
    for file in manifest.borrowed:
        if not _BORROWED.fullmatch(file.path):
            raise CorruptCheckpointError(f"{path} is damaged: {file.path!r} is not a valid name of a file of blocks")
    return manifest


def read_manifest(directory: CheckpointDirectory) -> Manifest:
    """The manifest, once every file that it names was found with its size.

    Raises CheckpointNotFoundError, CorruptCheckpointError, CheckpointError, OSError.
    """
    manifest = decode_manifest(directory)
    _check_sizes(directory, manifest.sizes())
    return manifest


def _check_sizes(directory: CheckpointDirectory, sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        path = directory.locate(name)
        try:
            size = directory.size(name)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"part of the checkpoint not found: there is no {path}") from None
        if size != nbytes:
            raise CorruptCheckpointError(f"{path} is damaged: it has {size} bytes instead of {nbytes}")


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


def check_places(directory: CheckpointDirectory, manifest: Manifest, places: Sequence[BlockPlace], name: str) -> None:
    """Raises CorruptCheckpointError for places, read from the file ``name``, that no save writes."""
    sizes = manifest.sizes()
    for number, place in enumerate(places):
        known = place.file >= -len(manifest.borrowed)
        size = sizes.get(manifest.path_of(place.file)) if known else None
        if not 0 <= place.slot < _MOST_SLOTS:
            problem = f"slot {place.slot} is none of a block table"
        elif size is None:
            problem = f"there is no file {place.file}"
        elif place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > size:
            problem = f"offset {place.offset} and bytes {place.nbytes} are not within file {place.file} of {size} bytes"
        else:
            continue
        raise CorruptCheckpointError(f"{directory}/{manifest.data}/{name} is damaged: block {number}: {problem}")


class Writer:
    """Writes a checkpoint beside the one that may be there; ``commit`` replaces it, atomically."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self._id = secrets.token_hex(4)
        self._folder = directory.begin(self._id)
        self._files: dict[str, FileEntry] = {}
        self._borrowed: list[BorrowedFile] = []
        self._open = contextlib.ExitStack()
        """The file of blocks that is being written."""
        self._blocks: BinaryIO | None = None
        self._number = -1
        self._size = 0

    def borrow(self, files: Sequence[BorrowedFile]) -> None:
        """Places with negative numbers of files are in these."""
        self._borrowed = list(files)

    def add_block(self, slot: int, segments: Sequence[memoryview], identity: bytes = b"") -> BlockPlace:
        """Append a block's bytes."""
        if self._blocks is None or self._size >= _FILE_BYTES:
            self._end_blocks()
            self._number += 1
            self._blocks = self._open.enter_context(self.directory.write(f"{self._folder}/{blocks_name(self._number)}"))
        offset, crc = self._size, 0
        for segment in segments:
            self._blocks.write(segment)
            crc = zlib.crc32(segment, crc)
            self._size += segment.nbytes
        return BlockPlace(slot, self._number, offset, self._size - offset, crc, identity)

    def add_file(self, name: str, content: bytes) -> None:
        with self.directory.write(f"{self._folder}/{name}") as file:
            file.write(content)
        self._files[name] = FileEntry(len(content), zlib.crc32(content))

    def commit(self, **about: Any) -> Manifest:
        """Make it the checkpoint of the directory. ``about``: the further fields of the manifest.

        Raises CheckpointNotFoundError if a borrowed file is gone.
        """
        self._end_blocks()
        _check_sizes(self.directory, {file.path: file.bytes for file in self._borrowed})
        manifest = Manifest(
            format=FORMAT if self._borrowed else 1,
            data=f"data-{self._id}",
            files=self._files,
            crc32=0,
            borrowed=self._borrowed,
            **about,
        )
        manifest = msgspec.structs.replace(manifest, crc32=manifest.checksum())
        former = _folders(self.directory)
        self.directory.publish(self._id, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
        if not self.directory.in_series():  # later ones may borrow from it; the series removes what none needs
            needed = {file.path for file in self._borrowed}
            for folder in {*former, *self.directory.abandoned()} - {manifest.data}:
                self.directory.remove(folder, needed)
        return manifest

    def abandon(self) -> None:
        """Give up; what was there before stays."""
        with contextlib.suppress(OSError):
            self._open.close()
        self.directory.remove(self._folder)

    def _end_blocks(self) -> None:
        self._open.close()
        if self._blocks is not None:
            self._blocks = None
            self._files[blocks_name(self._number)] = FileEntry(self._size)
            self._size = 0


def _folders(directory: CheckpointDirectory) -> set[str]:
    """The folders of data in ``directory`` that its manifest names."""
    with contextlib.suppress(OSError, CheckpointError):
        manifest = decode_manifest(directory)
        borrowed = {file.path.partition("/")[0] for file in manifest.borrowed}
        return {manifest.data, *borrowed} - {".."}
    return set()


def blocks_name(number: int) -> str:
    """Name of a file of blocks within the folder of data."""
    return f"blocks-{number:05d}"
