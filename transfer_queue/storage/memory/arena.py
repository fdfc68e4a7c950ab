"""The memory of a storage unit: a file on tmpfs that the unit and the clients of its host map.

::

    offset 0      nonce, 16 random bytes: who maps the file and reads the nonce that the unit told it shares its memory
           16     8 bytes that say that the file is an arena: written once its unit holds its lock
           4096   extents
           end    for readers of this host: where small blocks lie (see ``shared_table``); not in a file that is kept

Untouched pages of a new file are several times slower to write than warm ones, so they are faulted in ahead of use, in
the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from transfer_queue.config.ownership import check_file
from transfer_queue.errors import InvalidInputError, StartError
from transfer_queue.storage.memory.extents import Extents
from transfer_queue.storage.memory.liveness import UNIT_LOCK, drop_lock, holds_lock, take_lock

__all__ = ["ArenaFile", "attach_arena", "populate", "remove_abandoned"]

log = logging.getLogger(__name__)

DATA_START: Final = 4096
NONCE_BYTES: Final = 16
MAGIC: Final = b"TQSHMEM1"
SLICE_BYTES: Final = 32 << 20
DEFAULT_FOLDER: Final = Path("/dev/shm")
MADV_POPULATE_WRITE: Final = 23
MIB: Final = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ArenaFile:
    """A file of ``capacity`` bytes for extents, plus one page, mapped shared.

    ``path``: where; None: a new name under /dev/shm. It should be on tmpfs. ``keep``: the file outlives this object,
    and an arena that is there is taken as it is. ``reserve``: all of it gets its place on the disk now, so that no
    write meets a full one. ``unnamed``: the file has no name, so that nothing of it is left when this process and all
    that map it are gone, however they end; ``path`` leads to it while this process lives. Raises StartError, naming the
    path, if it cannot be created, is in use, is no arena or another user's, or its file system has too little room.
    """

    def __init__(
        self,
        capacity: int,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: bool = False,
        reserve: bool = False,
        unnamed: bool = False,
        table: int = 0,
    ) -> None:
        """``table``: bytes behind the extents for a `SharedBlockTable`."""
        if capacity < 1:
            raise InvalidInputError(f"an arena needs a capacity of at least 1 byte, not {capacity}")
        self.path = DEFAULT_FOLDER / f"tq-{os.getpid()}-{secrets.token_hex(8)}" if path is None else Path(path)
        self._unnamed = unnamed
        self.capacity = capacity
        self.table_start = DATA_START + -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        """Offset of the table."""
        self.nbytes = self.table_start + -(-table // mmap.PAGESIZE) * mmap.PAGESIZE
        """Bytes of the file."""
        self._keep = keep
        self.is_new = False
        """True if there was no complete arena."""
        self.descriptor = self._open() if keep else -1
        """Descriptor of the file, with the unit's lock."""
        if self.descriptor < 0:
            self.descriptor = self._create()
        self._map = self._mapped()
        if reserve:
            self._reserve()
        self.memory = memoryview(self._map)
        """All bytes of the file; offsets of extents count from its start."""
        self.nonce = bytes(self.memory[:NONCE_BYTES])
        self.prefaulted = 0
        """Bytes faulted in so far."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _open(self) -> int:
        """Descriptor of the file of an earlier process, with this process's lock; -1 if there is none."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise StartError(f"cannot open the arena {self.path}: {error.strerror}; give another path") from error
        try:
            check_file(handle, self.path)
            if holds_lock(handle, UNIT_LOCK):
                raise StartError(
                    f"the arena {self.path} is served by another process; stop it or choose another directory"
                )
            size = os.fstat(handle).st_size
            if size and not _is_arena(handle):
                raise StartError(f"{self.path} is not an arena of this version; move it away to start empty")
            if size not in (0, DATA_START, self.nbytes):
                raise StartError(f"the arena {self.path} has {size} bytes, not {self.nbytes}; remove it to start empty")
            take_lock(handle, UNIT_LOCK)
            if size != self.nbytes:  # its maker was killed
                self._check_room()
                self._make(handle)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _create(self) -> int:
        if self._unnamed:
            handle = os.memfd_create("tq-arena", os.MFD_CLOEXEC)
            self.path = Path(f"/proc/{os.getpid()}/fd/{handle}")
            take_lock(handle, UNIT_LOCK)
            self._make(handle)
            return handle
        try:
            self._check_room()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot create the arena {self.path}: {error.strerror}; give another path") from error
        try:
            take_lock(handle, UNIT_LOCK)
            self._make(handle)
        except BaseException:
            self.path.unlink(missing_ok=True)
            os.close(handle)
            raise
        return handle

    def _check_room(self) -> None:
        folder = self.path.parent
        room = os.statvfs(folder)
        available = room.f_bavail * room.f_frsize
        if available < self.nbytes:
            raise StartError(
                f"{folder} has {available // MIB} MiB free, and an arena at {self.path} needs "
                f"{-(-self.nbytes // MIB)} MiB: lower the storage capacity (spec.storage.capacity; of init(): "
                f"backend.SimpleStorage.unit_capacity) or enlarge {folder} (docker run --shm-size=...; in a pod: an "
                "emptyDir of medium Memory with a larger sizeLimit; else: mount -o remount,size=...)"
            )

    def _make(self, handle: int) -> None:
        """Write the header first: a file with a header is recognized as an arena, even if this process is killed."""
        try:
            self.is_new = True
            os.pwrite(handle, (secrets.token_bytes(NONCE_BYTES) + MAGIC).ljust(DATA_START, b"\0"), 0)
            os.ftruncate(handle, self.nbytes)
        except OSError as error:
            raise StartError(f"cannot make the arena {self.path}: {error.strerror}; give another path") from error

    def _mapped(self) -> mmap.mmap:
        try:
            return mmap.mmap(self.descriptor, self.nbytes)
        except (OSError, ValueError) as error:
            self._discard()
            raise StartError(f"cannot map {self.nbytes} bytes of the arena {self.path}: {error}") from error

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, self.nbytes)
        except OSError as error:
            self._map.close()
            self._discard()
            raise StartError(
                f"{self.path.parent} has no room for the {-(-self.nbytes // MIB)} MiB of the arena {self.path}: "
                f"{error.strerror}; lower the storage capacity or make room there"
            ) from None

    def _discard(self) -> None:
        if self.is_new and not self._unnamed:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)
        self.descriptor = -1

    def extents(self, align: int = 64) -> Extents:
        """An allocator of this arena's extents, all free."""
        return Extents(self.capacity, start=DATA_START, align=align)

    def start_prefault(self, progress: Callable[[int, int], None] | None = None, *, most: int | None = None) -> None:
        """Fault all pages in, in a background thread that mostly runs without the GIL; contents stay as they are.

        ``most``: the first so many bytes only. ``progress(done, total)``: called in that thread after each 32 MiB, and
        at the end. May be called once.
        """
        if self._thread is not None:
            raise InvalidInputError("prefaulting was already started")
        total = self.nbytes if most is None else min(most, self.nbytes)
        self._thread = threading.Thread(target=self._prefault, args=(progress, total), name="tq-prefault", daemon=True)
        self._thread.start()

    def wait_prefaulted(self, timeout: float | None = None) -> bool:
        """Wait for the background thread, at most ``timeout`` seconds; whether all pages are in."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.prefaulted == self.nbytes

    def _prefault(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        pages = np.frombuffer(self._map, np.uint8)
        address = pages.ctypes.data
        # Only a wish: kernels without huge pages for shared memory refuse it.
        _libc.madvise(address, self.nbytes, mmap.MADV_HUGEPAGE)
        for start in range(0, total, SLICE_BYTES):
            if self._stop.is_set():
                return
            size = min(SLICE_BYTES, total - start)
            if _libc.madvise(address + start, size, MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    log.warning(
                        "only %d of %d MiB of the arena %s could be faulted in: %s; %s or the memory limit is used up",
                        start // MIB,
                        self.nbytes // MIB,
                        self.path,
                        os.strerror(code),
                        self.path.parent,
                    )
                    return
                # Before Linux 5.14. Reading a hole of a tmpfs file allocates its page as well.
                pages[start : start + size : mmap.PAGESIZE].max()
            self.prefaulted = start + size
            if progress is not None:
                progress(self.prefaulted, total)

    def close(self) -> None:
        """End prefaulting, unmap and, unless it is to be kept, remove the file. Idempotent.

        Memory that views of ``memory`` still refer to stays mapped until they are gone.
        """
        self._stop.set()
        self.wait_prefaulted()
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()
        if self.descriptor >= 0:
            drop_lock(self.descriptor, UNIT_LOCK)  # views keep the map, and the map keeps the open file
            os.close(self.descriptor)
            self.descriptor = -1
            if not (self._keep or self._unnamed):
                self.path.unlink(missing_ok=True)

    def abandon_in_child(self) -> None:
        """After a fork: the memory ends with the parent, unless views of it are in use. Its lock is the parent's."""
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _is_arena(descriptor: int) -> bool:
    return os.pread(descriptor, len(MAGIC), NONCE_BYTES) == MAGIC


def remove_abandoned(directory: Path) -> None:
    """Remove arenas of this user's killed units, whose memory would otherwise stay in use."""
    for path in directory.glob("tq-*-*-*"):
        with contextlib.suppress(OSError):  # another user's, or just removed
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                own = os.fstat(handle).st_uid == os.geteuid()
                if own and _is_arena(handle) and not holds_lock(handle, UNIT_LOCK):
                    path.unlink()
            finally:
                os.close(handle)


def populate(memory: memoryview) -> None:
    """Enter the pages of a mapped arena's ``memory`` into this process's page tables, in one call.

    The pages are there since the unit faulted them in, but each process would still meet a fault at each of them, which
    halves the speed of a first copy. Before Linux 5.14 this does nothing.
    """
    start = np.frombuffer(memory, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(first, start + memory.nbytes - first, MADV_POPULATE_WRITE)


def attach_arena(path: str | os.PathLike[str], nbytes: int, nonce: bytes) -> mmap.mmap | None:
    """Map another process's arena for reading and writing; None if this host does not share it.

    A file that is absent, not accessible, of another size or with another nonce is not it.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_size != nbytes:
            return None
        mapped = mmap.mmap(handle, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)
    if mapped[: len(nonce)] == nonce:
        return mapped
    mapped.close()
    return None
