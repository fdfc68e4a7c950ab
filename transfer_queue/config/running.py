"""The note of a queue that ``tq up`` keeps on this machine: in its folder, for ``tq`` and for programs of this user."""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from transfer_queue.config.trouble import state_root

__all__ = ["Restart", "RunningQueue", "ServerState", "noted_queues"]


class ServerState(msgspec.Struct):
    """A server process: its pid, and host:port where it has one."""

    name: str
    pid: int
    address: str = ""


class Restart(msgspec.Struct):
    """A server that ended and was started again. ``at``: seconds since 1970."""

    at: float
    what: str


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
