"""Checks of the owner of a folder or file before it is trusted, overwritten or removed. Names prove nothing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from transfer_queue.errors import StartError

__all__ = ["check_file", "is_own", "open_checked", "open_own", "private_folder"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path, own: int = 1, *, fix: str) -> None:
    """Make ``path`` readable only by this user, who must own its last ``own`` parts.

    Raises StartError, naming the part and ``fix``, for a part that is a link or not a folder, belongs to another user,
    or is writable by others; OSError if a folder cannot be made.
    """
    parts = [path, *path.parents][:own]
    parts[-1].parent.mkdir(parents=True, exist_ok=True)
    for part in reversed(parts):
        try:
            part.mkdir(mode=0o700)
        except FileExistsError:
            _check_folder(part, fix)
            part.chmod(0o700)


def _check_folder(path: Path, fix: str) -> None:
    found = path.lstat()
    remedy = "look at it and remove it"
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, who could read and change what lies there"
    elif found.st_mode & _OTHERS_WRITE:
        problem = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o}), who may have left files there"
        remedy = f"look at what is there, then chmod 700 {path}"
    else:
        return
    raise StartError(f"{path} {problem}; {remedy}, or {fix}")


def check_file(descriptor: int, path: Path) -> None:
    """Raises StartError if an open file is not regular, or if another user may have made it: this user does not own it,
    and its folder is world-writable or belongs to another user than root."""
    found, folder = os.fstat(descriptor), path.parent.stat()
    if not stat.S_ISREG(found.st_mode):
        raise StartError(f"{path} is not a regular file; remove it or choose another folder")
    shared = folder.st_mode & stat.S_IWOTH or folder.st_uid not in (0, os.geteuid())
    if found.st_uid != os.geteuid() and shared:
        raise StartError(
            f"{path} belongs to user {found.st_uid}, who could read and change it; have it removed, or choose a folder "
            "of your own"
        )


def open_checked(path: Path) -> int:
    """Open a file for reading. Raises StartError for a link and as `check_file`, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StartError(f"{path} is a link; remove it or choose another folder") from None
        raise
    try:
        check_file(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_own(path: Path, magic: bytes) -> bool:
    """Whether a file begins with ``magic``, or with the part of it that a crash left."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _begins(descriptor, magic)
    finally:
        os.close(descriptor)


def open_own(path: Path, magic: bytes) -> int:
    """Open a file for writing from its start. It is made with mode 0600 if absent, and truncated if present.

    Raises FileExistsError for a file that does not begin with ``magic``, and for a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileExistsError(errno.EEXIST, f"{path.name} is a link; remove it") from None
        raise
    if not _begins(descriptor, magic):
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, f"{path.name} belongs to another program; move it away")
    os.ftruncate(descriptor, 0)
    return descriptor


def _begins(descriptor: int, magic: bytes) -> bool:
    head = os.pread(descriptor, len(magic), 0)
    return magic.startswith(head) or not any(head)
