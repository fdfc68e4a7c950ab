"""Queues that run on this machine: one folder each, with settings, logs and who runs it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from transfer_queue.config.ownership import private_folder
from transfer_queue.config.running import CHECKPOINT_STATUS, RunningQueue, ServerState, read_report, write_note
from transfer_queue.config.trouble import Trouble, read_trouble, state_root
from transfer_queue.errors import StartError, TransferQueueError

__all__ = [
    "RunningQueue",
    "ServerState",
    "claim",
    "read_ended",
    "read_running",
    "state_root",
    "stop_running",
    "write_running",
]


_OTHER_FOLDER = "set XDG_STATE_HOME to a writable folder of your own"
_RECENT_S = 86400.0
_COMMON_FILES = ("attach.yaml", "policy.yaml", "tq.log", "mooncake_master.log", "trouble.json", CHECKPOINT_STATUS)
"""Files that every run with a note writes, besides two for each server."""


@contextmanager
def claim(name: str) -> Iterator[Path]:
    """The folder of queue ``name``, which is this process's until the end of the block.

    Raises StartError if a process has it, or if it is not this user's. Logs of the last run stay until the next one,
    which removes those of the servers that the last run noted.
    """
    folder = state_root() / name
    try:
        private_folder(folder, 2, fix=_OTHER_FOLDER)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"{folder}: {error.strerror}; {_OTHER_FOLDER}") from None
    try:
        if not _lock(lock):
            raise StartError(f"queue {name} is already running here; stop it with: tq down {name}")
        for note in ("queue.json", "last.json"):  # the first, if the last run was killed
            _remove_noted(folder, note)
        yield folder
        with suppress(FileNotFoundError):
            (folder / "queue.json").rename(folder / "last.json")
    finally:
        os.close(lock)


def _remove_noted(folder: Path, note: str) -> None:
    """Remove the files that the note of a former run lists, and the note."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        queue = msgspec.json.decode((folder / note).read_bytes(), type=RunningQueue)
        servers = [server.name for server in queue.servers if "/" not in server.name]
        for name in [note, *_COMMON_FILES, *(f"{server}.{kind}" for server in servers for kind in ("log", "json"))]:
            (folder / name).unlink(missing_ok=True)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_running(folder: Path, queue: RunningQueue) -> None:
    """Note in its folder that ``queue`` runs. The file appears whole."""
    write_note(folder / "queue.json", queue)


def read_running() -> list[RunningQueue]:
    """The queues that run now, by name."""
    return [queue for folder in sorted(state_root().glob("*/")) if (queue := _read(folder))]


def read_ended() -> list[Trouble]:
    """Return why queues of this machine ended in the last day: the last run of each name, the latest first."""
    running = {queue.name for queue in read_running()}
    ended = []
    for folder in state_root().glob("*/"):
        trouble = read_trouble(folder)
        if (trouble is None or trouble.state == "restarting") and (folder / "queue.json").exists():
            at = (folder / "queue.json").stat().st_mtime
            trouble = Trouble(folder.name, [], "its tq up was killed, and the servers with it", "failed", at)
        if trouble is not None and trouble.state != "restarting" and folder.name not in running:
            ended.append(trouble)
    ended = [trouble for trouble in ended if time.time() - trouble.at < _RECENT_S]
    return sorted(ended, key=lambda trouble: trouble.at, reverse=True)


def _read(folder: Path) -> RunningQueue | None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _lock(lock):  # not locked: the file belongs to a run that ended
            return None
        found = msgspec.json.decode((folder / "queue.json").read_bytes(), type=RunningQueue)
        return msgspec.structs.replace(found, checkpoint=read_report(folder / CHECKPOINT_STATUS))
    except FileNotFoundError:
        return None  # starting or stopping
    finally:
        os.close(lock)


def stop_running(queue: RunningQueue, timeout_s: float = 60.0) -> None:
    """Take ``queue`` down and wait for its end. Raises TransferQueueError if it does not end in time."""
    try:
        keeper = psutil.Process(queue.pid)
        keeper.send_signal(signal.SIGTERM)
        keeper.wait(timeout_s)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        raise TransferQueueError(
            f"queue {queue.name} did not end within {timeout_s:g} s; end it with: kill -9 {queue.pid}"
        ) from None
