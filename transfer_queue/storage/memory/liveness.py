"""Does a process that writes or reads the arena still run? Answered by the kernel, across containers.

A client that maps an arena holds a lock on one byte of the arena's file, at a position that the unit gave it. The
kernel drops the lock when the process ends, however it ends. A connection that breaks says less: a process stopped for
a minute loses its connection and then goes on copying. So memory that a lost client may still touch is recycled only
when its lock is gone. Open-file-description locks (Linux) work on tmpfs and between pid namespaces.
"""

from __future__ import annotations

import fcntl
import struct

__all__ = ["UNIT_LOCK", "drop_lock", "holds_lock", "take_lock"]

UNIT_LOCK = 0
"""The unit's own lock; clients have positive numbers."""
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid
_FIRST = 1 << 40
"""Lock positions lie beyond any data."""


def take_lock(descriptor: int, number: int) -> None:
    """Lock byte ``number`` for as long as the open file lives. Raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, 0, _FIRST + number, 1, 0))


def drop_lock(descriptor: int, number: int) -> None:
    """Undo `take_lock` while the file stays open."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, _FIRST + number, 1, 0))


def holds_lock(descriptor: int, number: int, count: int = 1) -> bool:
    """Does any other open file hold one of the ``count`` locks from ``number`` on?"""
    request = _FLOCK.pack(fcntl.F_WRLCK, 0, _FIRST + number, count, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
