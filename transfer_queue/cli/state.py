"""Queues that run on this machine: one folder each, with settings, logs and who runs it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
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
_NOTE = "queue.json"
_RECORD = "files of this queue:\n"
"""First line of the file ``lock``. Below it are the files that runs of the queue made in its folder, one a line."""


@contextmanager
def claim(name: str, files: Sequence[str] = ()) -> Iterator[Path]:
    """The folder of queue ``name``, which is this process's until the end of the block.

    ``files``: what the run will write there, besides its note. Logs of the last run stay until the next one, which
    removes the files that are recorded as the queue's own. Raises StartError if a process has the folder, if it is not
    this user's, or if it has files of these names that are not recorded.
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
        _take_over(folder, lock, [_NOTE, f"{_NOTE}.new", *files])
        yield folder
        (folder / _NOTE).unlink(missing_ok=True)
    finally:
        os.close(lock)


def _take_over(folder: Path, lock: int, files: Sequence[str]) -> None:
    """Remove the files of former runs, and record ``files`` before any of them is made. Raises StartError."""
    record = os.pread(lock, os.fstat(lock).st_size, 0).decode(errors="replace")
    if record and not record.startswith(_RECORD):
        raise StartError(f"{folder / 'lock'} belongs to another program; move it away, or {_OTHER_FOLDER}")
    own = record.removeprefix(_RECORD).splitlines() if record else _noted_files(folder)
    foreign = [name for name in files if name not in own and _is_there(folder / name)]
    if foreign:
        names = ", ".join(foreign)
        raise StartError(f"{folder} holds files that queue {folder.name} did not make: {names}; move them away")
    recorded = "\n".join([_RECORD.strip(), *files, ""]).encode()
    try:
        for name in own:
            if _is_there(folder / name):
                (folder / name).unlink()
        os.ftruncate(lock, 0)
        written = os.pwrite(lock, recorded, 0)
    except OSError as error:
        where = error.filename or folder / "lock"
        raise StartError(f"cannot write {where}: {error.strerror}; make room, or {_OTHER_FOLDER}") from None
    if written < len(recorded):
        raise StartError(f"cannot write {folder / 'lock'}: the disk is full; make room, or {_OTHER_FOLDER}")


def _noted_files(folder: Path) -> list[str]:
    """What a run of an earlier build made, which kept no record but a note with the names of its servers."""
    for note in ("last.json", _NOTE):
        with suppress(OSError, msgspec.DecodeError):
            queue = msgspec.json.decode((folder / note).read_bytes(), type=RunningQueue)
            servers = [server.name for server in queue.servers if "/" not in server.name]
            common = ["last.json", _NOTE, "attach.yaml", "tq.log", "mooncake_master.log", "trouble.json"]
            return [*common, CHECKPOINT_STATUS, *(f"{name}.{kind}" for name in servers for kind in ("log", "json"))]
    return []


def _is_there(path: Path) -> bool:
    """Whether the file exists. Raises StartError if its folder is a link, which may lead to files of others."""
    if path.parent.is_symlink():
        raise StartError(f"{path.parent} is a link; remove it")
    return os.path.lexists(path)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_running(folder: Path, queue: RunningQueue) -> None:
    """Note in its folder that ``queue`` runs. The file appears whole."""
    write_note(folder / _NOTE, queue)


def read_running() -> list[RunningQueue]:
    """The queues that run now, by name."""
    return [queue for folder in sorted(state_root().glob("*/")) if (queue := _read(folder))]


def read_ended() -> list[Trouble]:
    """Return why queues of this machine ended in the last day: the last run of each name, the latest first."""
    running = {queue.name for queue in read_running()}
    ended = []
    for folder in state_root().glob("*/"):
        trouble = read_trouble(folder)
        if (trouble is None or trouble.state == "restarting") and (folder / _NOTE).exists():
            at = (folder / _NOTE).stat().st_mtime
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
        found = msgspec.json.decode((folder / _NOTE).read_bytes(), type=RunningQueue)
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
