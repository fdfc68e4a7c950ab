"""Servers that backends need, as child processes that end with the process that started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from transfer_queue.errors import StartError
from transfer_queue.storage.mooncake import guard

__all__ = ["free_ports", "listens", "running"]

START_S = 120.0
_STOP_S = 15.0


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    directory: Path,
    serves: Callable[[], bool],
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` for the time of a ``with`` block, once ``serves`` is true; its output goes to ``directory/name.log``.

    It gets SIGTERM at the end of the block and also when this process is gone, however that happens.
    Raises StartError with the end of the log.
    """
    path = directory / f"{name}.log"
    # In a session of its own, so that what is sent to this process's group does not end the guard first.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())], stdin=subprocess.PIPE, start_new_session=True
    )
    process: subprocess.Popen[bytes] | None = None
    try:
        with path.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=environ
            )
    except OSError as error:
        raise StartError(f"{name} cannot be started: {error}") from None
    finally:
        assert watcher.stdin is not None
        watcher.stdin.write(b"%d\n" % process.pid if process else b"\n")
        watcher.stdin.close()
        if process is None:
            watcher.wait()
    try:
        deadline = time.monotonic() + START_S
        while not serves():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"{name} does not serve: {path.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        watcher.wait()  # it ends by itself now


def listens(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct TCP ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
