"""Notes about a running queue, for ``tq`` and for programs of its user: by ``tq up``, and by what saves the queue."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from transfer_queue.config.trouble import state_root

__all__ = [
    "CHECKPOINT_STATUS",
    "CheckpointReport",
    "LastCheckpoint",
    "Restart",
    "Restored",
    "RunningQueue",
    "ServerState",
    "noted_queues",
    "read_report",
    "write_note",
]

CHECKPOINT_STATUS = "checkpoint-status.json"
"""File in the folder of a queue of ``tq up``: a CheckpointReport."""


class ServerState(msgspec.Struct):
    """A server process: its pid, and host:port where it has one."""

    name: str
    pid: int
    address: str = ""


class Restart(msgspec.Struct):
    """A server that ended and was started again. ``at``: seconds since 1970."""

    at: float
    what: str


class LastCheckpoint(msgspec.Struct, omit_defaults=True):
    """The last complete checkpoint of a schedule. ``time``: RFC 3339, in UTC; empty before the first one.
    ``error``: why the last attempt failed; empty if it did not."""

    time: str = ""
    rows: int = 0
    bytes: int = 0
    url: str = ""
    error: str = ""


class Restored(msgspec.Struct, omit_defaults=True):
    """The result of ``spec.restoreFrom``. ``loaded``: false if the queue had rows, which ``message`` counts."""

    url: str
    loaded: bool
    message: str


class CheckpointReport(msgspec.Struct, omit_defaults=True):
    """What the process that restores and saves a queue did."""

    last: LastCheckpoint | None = None
    restored: Restored | None = None
    restoring: bool = False
    """Whether a restore has begun and did not end."""


class RunningQueue(msgspec.Struct):
    """A queue started by ``tq up``. ``pid``: the process that keeps it; a SIGTERM to it takes the queue down."""

    name: str
    pid: int
    backend: str
    controller: str
    attach_file: str
    servers: list[ServerState] = []
    page: str = ""
    """URL of the page that shows the queue."""
    restarts: list[Restart] = []
    """The last ones, the latest last."""
    checkpoint: CheckpointReport | None = None
    """What was restored and saved, as of now."""


def noted_queues() -> list[RunningQueue]:
    """The queues of this user whose keeper is alive, without looking at their locks: for a hint."""
    found = []
    with suppress(OSError):  # a home that this user may not enter
        for path in sorted(state_root().glob("*/queue.json")):
            with suppress(OSError, msgspec.DecodeError):
                queue = msgspec.json.decode(path.read_bytes(), type=RunningQueue)
                os.kill(queue.pid, 0)
                found.append(queue)
    return found


def read_report(file: Path) -> CheckpointReport | None:
    """The report that the process which saves a queue wrote to ``file``; None without a readable one."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(file.read_bytes(), type=CheckpointReport)
    return None


def write_note(file: Path, note: msgspec.Struct) -> None:
    """Write ``note`` as JSON; the file appears whole. Raises OSError."""
    draft = file.with_name(f"{file.name}.new")
    draft.write_bytes(msgspec.json.encode(note))
    draft.replace(file)
