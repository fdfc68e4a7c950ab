"""Where the files of a checkpoint lie: a directory, or a prefix of an object store that fsspec reaches."""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Union

import numpy as np

from transfer_queue.errors import CheckpointError, InvalidInputError, InvalidTypeError

__all__ = ["MANIFEST", "PART", "SERIES", "CheckpointDirectory", "Range", "open_directory"]

MANIFEST = "metadata.json"
"""A checkpoint exists once this file does. It is replaced atomically."""
SERIES = ".transferqueue-series"
"""File in each checkpoint that a save at intervals makes. It holds the identity of the queue."""
_MARKER = ".transferqueue-checkpoint"
"""File in each folder of data that a save makes. It holds the ID in the folder's name."""
_DATA_FOLDER = re.compile(r"(?:data-|\.new-)([0-9a-f]{8})")
PART = re.compile(r"blocks-[0-9]{5,}|blocks\.msgpack|controller\.msgpack|rows\.msgpack")
"""The files that a manifest lists. A save writes them to such a folder, and the manifest."""
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(/?)")
_ABANDONED_S = 24 * 3600
"""An object store has no locks. A folder of data may belong to a save under way until it has this age."""

Buffer = Union["np.ndarray[Any, np.dtype[np.uint8]]", bytes]


class Range(NamedTuple):
    """Part of a file."""

    name: str
    offset: int
    nbytes: int


class CheckpointDirectory(abc.ABC):
    """Files by their names relative to the directory, such as ``data-0a1b2c3d/blocks-00000``, or
    ``../20261129T203000Z/data-0a1b2c3d/blocks-00000`` for a file of another directory beside it.

    Methods raise OSError, among them FileNotFoundError.
    """

    @abc.abstractmethod
    def __str__(self) -> str: ...

    @abc.abstractmethod
    def create(self) -> None:
        """Make the directory if it does not exist."""

    @abc.abstractmethod
    def locked(self, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        """Exclude other savers, and readers unless ``shared``. Raises CheckpointError at once if somebody has it."""

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """In bytes."""

    @abc.abstractmethod
    def modified(self, name: str) -> float:
        """When the file was last written, in seconds since the epoch."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes: ...

    @abc.abstractmethod
    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]: ...

    @abc.abstractmethod
    def write(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file. It is durable when the context ends."""

    @abc.abstractmethod
    def begin(self, identifier: str) -> str:
        """Make the folder to which a save writes, with its marker, and return its name."""

    @abc.abstractmethod
    def publish(self, identifier: str, manifest: bytes) -> None:
        """Replace the manifest atomically. Its data is in ``data-IDENTIFIER`` afterwards."""

    @abc.abstractmethod
    def abandoned(self) -> list[str]:
        """The folders of data that saves made, by their markers, and that no save under way uses."""

    @abc.abstractmethod
    def remove(self, folder: str, needed: Collection[str] = ()) -> None:
        """Remove the files that saves write from a folder of data, and the folder if it is then empty. The files
        ``needed`` stay."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders in it; none if it does not exist."""

    @abc.abstractmethod
    def retract(self) -> None:
        """Remove the manifest, so that there is no checkpoint any more. Needs the lock. Raises CheckpointError for a
        link."""

    @abc.abstractmethod
    def erase(self, needed: Collection[str] = ()) -> None:
        """Remove what saves left, except for the files ``needed``. The manifest has been removed. Raises
        CheckpointError for a link."""

    def is_link(self) -> bool:
        """Whether it is a link to a directory elsewhere. Such a directory can be read, and nothing in it is removed."""
        return False

    def was_saved_to(self) -> bool:
        """Whether a save left a folder of data."""
        return bool(self.abandoned())

    def in_series(self) -> bool:
        """Whether it is one checkpoint of a series."""
        with contextlib.suppress(FileNotFoundError):
            return self.size(SERIES) >= 0
        return False

    def locate(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        beside, _, own = str(self).rpartition("/")
        return f"{beside}/{name[3:]}" if own and name.startswith("../") else f"{self}/{name}"


def open_directory(checkpoint_dir: object) -> CheckpointDirectory:
    """The directory at a path, or at a URL such as ``s3://bucket/run7/queue``.

    Raises InvalidTypeError, InvalidInputError.
    """
    if not isinstance(checkpoint_dir, str | os.PathLike):
        raise InvalidTypeError(f"checkpoint_dir must be a path or a URL, not {type(checkpoint_dir).__name__}")
    path = os.fspath(checkpoint_dir)
    if not path:
        raise InvalidInputError("checkpoint_dir must not be empty; '.' is the current directory")
    url = _URL.match(path)
    if url is None:
        return LocalDirectory(Path(path))
    if not url[2]:
        raise InvalidInputError(f"checkpoint_dir {path!r} is a URL made into a path; pass the URL as a string")
    if url[1] == "file":
        return LocalDirectory(Path(path.removeprefix("file://")))
    return ObjectStoreDirectory(path)


class LocalDirectory(CheckpointDirectory):
    """On a file system, where renames are atomic and files can be synchronised."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def create(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise CheckpointError(f"{self} is being saved to or loaded from; try again later") from None
                # A file system without locks: one saver at a time is then up to the caller.
            yield
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def modified(self, name: str) -> float:
        return (self._path / name).stat().st_mtime

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        return [np.fromfile(self._path / name, np.uint8, nbytes, offset=offset) for name, offset, nbytes in ranges]

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        with (self._path / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def begin(self, identifier: str) -> str:
        name = f".new-{identifier}"
        (self._path / name).mkdir()
        (self._path / name / _MARKER).write_text(identifier)
        return name

    def publish(self, identifier: str, manifest: bytes) -> None:
        data = f"data-{identifier}"
        _sync_folder(self._path / f".new-{identifier}")
        (self._path / f".new-{identifier}").rename(self._path / data)
        with self.write(f"{data}/{MANIFEST}") as file:
            file.write(manifest)
        _sync_folder(self._path)
        (self._path / data / MANIFEST).replace(self._path / MANIFEST)
        _sync_folder(self._path)

    def abandoned(self) -> list[str]:
        return [folder.name for folder in self._path.iterdir() if self._is_own(folder)]

    def _is_own(self, folder: Path) -> bool:
        match = _DATA_FOLDER.fullmatch(folder.name)
        if match is None or folder.is_symlink():
            return False
        with contextlib.suppress(OSError, ValueError):
            return (folder / _MARKER).read_text() == match[1]
        return False

    def remove(self, folder: str, needed: Collection[str] = ()) -> None:
        """A link stays, and so does what it leads to: the folder of another checkpoint."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.listdir(descriptor)
                kept = {name for name in found if f"{folder}/{name}" in needed}
                marker = {_MARKER} & {*found} if not kept else ()
                for name in [*filter(_is_written, {*found} - kept), *marker]:
                    os.unlink(name, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            (self._path / folder).rmdir()

    def folders(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in self._path.iterdir() if path.is_dir()]
        return []

    def is_link(self) -> bool:
        return self._path.is_symlink()

    def _check_no_link(self) -> None:
        if self.is_link():
            raise CheckpointError(f"{self} is a link, and nothing is removed through a link; remove what it leads to")

    def retract(self) -> None:
        self._check_no_link()
        (self._path / MANIFEST).unlink(missing_ok=True)
        _sync_folder(self._path)

    def erase(self, needed: Collection[str] = ()) -> None:
        self._check_no_link()
        for folder in self.abandoned():
            self.remove(folder, needed)
        if not needed:
            (self._path / SERIES).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files of somebody else stay
                self._path.rmdir()


class ObjectStoreDirectory(CheckpointDirectory):
    """A prefix of an object store, where a file appears as a whole once it is written."""

    def __init__(self, url: str) -> None:
        """Raises InvalidInputError if fsspec does not know the store, or the library for it is not installed."""
        import fsspec

        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidInputError(
                f"checkpoint_dir {url!r} cannot be used: {error}; fsspec's list of stores names the library of each"
            ) from None
        self._url, self._root = url.rstrip("/"), root.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def create(self) -> None:
        pass  # a prefix exists with its first file

    @contextlib.contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        """No store has locks: one saver at a time is up to the caller."""
        self._files.invalidate_cache()
        yield

    def size(self, name: str) -> int:
        with _store_errors():
            return int(self._files.size(self._at(name)))

    def modified(self, name: str) -> float:
        with _store_errors():
            return float(self._files.modified(self._at(name)).timestamp())

    def read(self, name: str) -> bytes:
        with _store_errors():
            return bytes(self._files.cat_file(self._at(name)))

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        with _store_errors():
            starts = [part.offset for part in ranges]
            ends = [part.offset + part.nbytes for part in ranges]
            return list(
                self._files.cat_ranges([self._at(part.name) for part in ranges], starts, ends, on_error="raise")
            )

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        with _store_errors(), self._files.open(self._at(name), "wb", block_size=64 << 20) as file:
            yield file

    def begin(self, identifier: str) -> str:
        name = f"data-{identifier}"
        with _store_errors():
            self._files.pipe_file(self._at(f"{name}/{_MARKER}"), identifier.encode())
        return name

    def publish(self, identifier: str, manifest: bytes) -> None:
        with _store_errors():
            self._files.pipe_file(self._at(MANIFEST), manifest)

    def abandoned(self) -> list[str]:
        self._files.invalidate_cache()
        with _store_errors():
            paths = self._files.ls(self._root, detail=False)
        return [name for name in (path.rstrip("/").rpartition("/")[2] for path in paths) if self._is_abandoned(name)]

    def was_saved_to(self) -> bool:
        with _store_errors():
            return any(_DATA_FOLDER.search(path) for path in self._files.ls(self._root, detail=False))

    def _is_own(self, folder: str) -> bool:
        match = _DATA_FOLDER.fullmatch(folder)
        with contextlib.suppress(OSError):
            return match is not None and self.read(f"{folder}/{_MARKER}") == match[1].encode()
        return False

    def _is_abandoned(self, folder: str) -> bool:
        with contextlib.suppress(OSError, NotImplementedError):
            return self._is_own(folder) and time.time() - self.modified(f"{folder}/{_MARKER}") > _ABANDONED_S
        return False

    def remove(self, folder: str, needed: Collection[str] = ()) -> None:
        with contextlib.suppress(OSError), _store_errors():
            names = [path.rpartition("/")[2] for path in self._files.ls(self._at(folder), detail=False)]
            kept = {name for name in names if f"{folder}/{name}" in needed}
            for name in filter(_is_written, {*names} - kept):
                self._files.rm_file(self._at(f"{folder}/{name}"))
            if not kept:
                self._files.rm_file(self._at(f"{folder}/{_MARKER}"))

    def folders(self) -> list[str]:
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError), _store_errors():
            found = self._files.ls(self._root, detail=True)
            return [each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory"]
        return []

    def retract(self) -> None:
        with contextlib.suppress(FileNotFoundError), _store_errors():
            self._files.rm_file(self._at(MANIFEST))

    def erase(self, needed: Collection[str] = ()) -> None:
        for folder in filter(self._is_own, self.folders()):
            self.remove(folder, needed)
        if not needed:
            with contextlib.suppress(FileNotFoundError), _store_errors():
                self._files.rm_file(self._at(SERIES))

    def _at(self, name: str) -> str:
        if name.startswith("../"):
            return f"{self._root.rpartition('/')[0]}/{name[3:]}"
        return f"{self._root}/{name}"


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """The boundary to the libraries of the stores: raises their errors, each of its own family, as OSError."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _is_written(name: str) -> bool:
    return name == MANIFEST or bool(PART.fullmatch(name))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
