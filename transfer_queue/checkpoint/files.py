"""The files of a checkpoint, see docs/checkpoint.md. The rename of ``metadata.json`` is what makes one valid."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from transfer_queue.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidInputError,
    InvalidTypeError,
)

__all__ = [
    "FORMAT",
    "BlockPlace",
    "FileEntry",
    "Manifest",
    "Progress",
    "Writer",
    "checked_directory",
    "locked",
    "read_manifest",
]

FORMAT = 1
_MANIFEST = "metadata.json"
_FILE_BYTES = 1 << 30
"""A file of blocks is followed by another one from this size on."""
_DATA_FOLDER = re.compile(r"(?:data-|\.new-)([0-9a-f]{8})")
_MARKER = ".transferqueue-checkpoint"
"""File in each folder of data that a save makes. It holds the hexadecimal digits of the folder's name. _PART matches
the other files that a save writes there."""
_PART = re.compile(r"blocks-[0-9]{5,}|blocks\.msgpack|controller\.msgpack|metadata\.json")
Progress = Callable[[int, int], None]
"""Called with the bytes of blocks that are done, and of all."""


class FileEntry(msgspec.Struct, frozen=True):
    """``crc32`` None: a file of blocks; each block has its own checksum."""

    bytes: int
    crc32: int | None = None


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where the block of slot ``slot`` of the state lies."""

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
    """Of this manifest with 0 here, as compact JSON."""

    @property
    def nbytes(self) -> int:
        """Of all files but ``metadata.json``."""
        return sum(entry.bytes for entry in self.files.values())

    def checksum(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, crc32=0), order="deterministic"))


def checked_directory(checkpoint_dir: object) -> Path:
    """Raises InvalidTypeError, InvalidInputError."""
    if not isinstance(checkpoint_dir, str | os.PathLike):
        raise InvalidTypeError(f"checkpoint_dir must be a path, not {type(checkpoint_dir).__name__}")
    if not os.fspath(checkpoint_dir):
        raise InvalidInputError("checkpoint_dir must not be empty; '.' is the current directory")
    return Path(checkpoint_dir)


@contextlib.contextmanager
def locked(directory: Path, *, shared: bool) -> Iterator[None]:
    """Nobody else writes (``shared``: several may read) meanwhile. Raises CheckpointError at once if somebody does."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(f"{directory} is being saved to or loaded from; try again later") from None
            # A file system without locks: one saver at a time is then up to the caller.
        yield
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointNotFoundError, CorruptCheckpointError; files are checked for being there at their sizes."""
    path = directory / _MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
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
        if not _PART.fullmatch(name):
            raise CorruptCheckpointError(f"{path} is damaged: {name!r} is not a valid name of a part")
        part = directory / manifest.data / name
        try:
            size = part.stat().st_size
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"part of the checkpoint not found: there is no {part}") from None
        if size != entry.bytes:
            raise CorruptCheckpointError(f"{part} is damaged: it has {size} bytes instead of {entry.bytes}")
    return manifest


def check_not_foreign(directory: Path) -> None:
    """Raises CheckpointError if ``metadata.json`` does not belong to a checkpoint. An unreadable file counts as a
    damaged checkpoint if a save left a folder of data beside it."""
    path = directory / _MANIFEST
    try:
        about = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        about = {"storage_saved"} if any(map(_is_own, directory.iterdir())) else None
    if not isinstance(about, dict | set) or "storage_saved" not in about:  # releases 0.1.x wrote that, too
        raise CheckpointError(f"{path} does not belong to a checkpoint, and would be lost; save elsewhere")


def read_file(directory: Path, manifest: Manifest, name: str) -> bytes:
    """A whole file, checked. Raises CheckpointNotFoundError, CorruptCheckpointError."""
    path = directory / manifest.data / name
    entry = manifest.files.get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{directory / _MANIFEST} is damaged: it does not list {name}")
    content = path.read_bytes()
    if zlib.crc32(content) != entry.crc32:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum differs")
    return content


class Writer:
    """Writes a checkpoint beside the one that may be there; ``commit`` replaces it, atomically."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._id = secrets.token_hex(4)
        self._folder = directory / f".new-{self._id}"
        self._folder.mkdir()
        (self._folder / _MARKER).write_text(self._id)
        self._files: dict[str, FileEntry] = {}
        self._blocks: BinaryIO | None = None
        self._number = -1
        self._size = 0

    def add_block(self, slot: int, segments: Sequence[memoryview]) -> BlockPlace:
        """Append a block's bytes."""
        if self._blocks is None or self._size >= _FILE_BYTES:
            self._end_blocks()
            self._number += 1
            self._blocks = (self._folder / _blocks_name(self._number)).open("wb")
        offset, crc = self._size, 0
        for segment in segments:
            self._blocks.write(segment)
            crc = zlib.crc32(segment, crc)
            self._size += segment.nbytes
        return BlockPlace(slot, self._number, offset, self._size - offset, crc)

    def add_file(self, name: str, content: bytes) -> None:
        with (self._folder / name).open("wb") as file:
            file.write(content)
            _sync(file)
        self._files[name] = FileEntry(len(content), zlib.crc32(content))

    def commit(self, **about: Any) -> Manifest:
        """Make it the checkpoint of the directory. ``about``: the further fields of the manifest."""
        self._end_blocks()
        _sync_folder(self._folder)
        data = f"data-{self._id}"
        self._folder.rename(self._directory / data)
        manifest = Manifest(format=FORMAT, data=data, files=self._files, **about)
        manifest = msgspec.structs.replace(manifest, crc32=manifest.checksum())
        former = _listed(self._directory)
        fresh = self._directory / data / _MANIFEST
        with fresh.open("wb") as file:
            file.write(json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
            _sync(file)
        _sync_folder(self._directory)
        fresh.replace(self._directory / _MANIFEST)
        _sync_folder(self._directory)
        for folder in self._directory.iterdir():
            if folder.name != data and (folder.name == former or _is_own(folder)):
                _remove_parts(folder)
        return manifest

    def abandon(self) -> None:
        """Give up; what was there before stays."""
        if self._blocks is not None:
            self._blocks.close()
        _remove_parts(self._folder)

    def _end_blocks(self) -> None:
        if self._blocks is not None:
            _sync(self._blocks)
            self._blocks.close()
            self._blocks = None
            self._files[_blocks_name(self._number)] = FileEntry(self._size)
            self._size = 0


def _listed(directory: Path) -> str | None:
    """The folder of data that the manifest of ``directory`` lists, if it is whole."""
    with contextlib.suppress(OSError, CheckpointError):
        return read_manifest(directory).data
    return None


def _is_own(folder: Path) -> bool:
    """Whether a save made this folder of data: only its marker counts, not its name."""
    match = _DATA_FOLDER.fullmatch(folder.name)
    if match is None or folder.is_symlink():
        return False
    with contextlib.suppress(OSError, ValueError):
        return (folder / _MARKER).read_text() == match[1]
    return False


def _remove_parts(folder: Path) -> None:
    """Remove the files that saves write from one of their folders, and the folder if it is then empty."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _PART.fullmatch(path.name):
                path.unlink()
        (folder / _MARKER).unlink(missing_ok=True)
        folder.rmdir()


def _blocks_name(number: int) -> str:
    return f"blocks-{number:05d}"


def blocks_path(directory: Path, manifest: Manifest, number: int) -> Path:
    return directory / manifest.data / _blocks_name(number)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
