"""Notes of why servers of a local queue ended, written by ``tq up``, read by ``tq status`` and waiting programs."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["TROUBLE_FILE", "Trouble", "clear_trouble", "read_trouble", "state_root", "trouble_at", "write_trouble"]

TROUBLE_FILE = "trouble.json"
_BYTES = 4096
"""Size of the file. It is overwritten in place, which also works on a full disk."""


class Trouble(msgspec.Struct):
    """The reason why a queue, or one of its servers, ended.

    ``state``: ``restarting``: a server is being restarted. ``failed``: the queue ended because a server cannot start.
    ``down``: the queue was taken down.
    """

    queue: str
    controllers: list[str]
    reason: str
    state: Literal["restarting", "failed", "down"] = "restarting"
    at: float = 0.0
    """Seconds since 1970."""
    uid: str = ""

    @property
    def text(self) -> str:
        return self.reason if self.state == "restarting" else f"queue {self.queue} ended: {self.reason}"


def state_root() -> Path:
    """``$XDG_STATE_HOME/transferqueue``, by default ``~/.local/state/transferqueue``."""
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a user whom the image does not know, in a pod: there is no queue of its own either
        home = Path("/.local/state")
    return Path(home) / "transferqueue"


def clear_trouble(folder: Path, addresses: Iterable[str] = ()) -> None:
    """Create the file of the queue with this folder, or empty it.

    Its controllers now serve at ``addresses``, so the notes of other queues that served there before are emptied too.
    """
    wanted = set(addresses)
    former = [other for other in _noted() if (old := read_trouble(other)) and wanted.intersection(old.controllers)]
    for each in {folder, *former}:
        with suppress(OSError):
            _write(each, b"")


def write_trouble(folder: Path, trouble: Trouble) -> None:
    """Write ``trouble`` with the time. Errors of the file system are ignored."""
    trouble.at = time.time()
    with suppress(OSError):
        _write(folder, msgspec.json.encode(trouble))


def _write(folder: Path, content: bytes) -> None:
    descriptor = os.open(folder / TROUBLE_FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, content[:_BYTES].ljust(_BYTES), 0)
    finally:
        os.close(descriptor)


def read_trouble(folder: Path) -> Trouble | None:
    """The last note; None if there is none."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        descriptor = os.open(folder / TROUBLE_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            content = file.read(_BYTES).strip() if own else b""
        if content:
            return msgspec.json.decode(content, type=Trouble)
    return None


def _noted() -> list[Path]:
    """Folders of this user's queues that have a note."""
    with suppress(OSError):  # a home that this user may not enter
        return [path.parent for path in state_root().glob(f"*/{TROUBLE_FILE}")]
    return []


def trouble_at(addresses: Iterable[str], name: str | None = None, uid: str | None = None) -> Trouble | None:
    """The note of this user's local queue with a controller at one of ``addresses``, and with this name and uid where
    both sides say them: queues may follow each other at one address."""
    wanted = set(addresses)
    folders = _noted()
    if os.environ.get("TQ_CONFIG_FILE"):
        folders.append(Path(os.environ["TQ_CONFIG_FILE"]).parent)
    for folder in folders:
        trouble = read_trouble(folder)
        if trouble is None or not wanted.intersection(trouble.controllers):
            continue
        if trouble.queue == (name or trouble.queue) and (not uid or trouble.uid in ("", uid)):
            return trouble
    return None
