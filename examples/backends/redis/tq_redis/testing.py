"""What the conformance suite needs: a Redis server on a free port of the loopback interface."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfer_queue.errors import StartError

__all__ = ["servers"]

_START_S = 30.0


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """A server that keeps nothing on disk. Raises StartError."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise StartError("redis-server is not installed: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        _wait_until_serving(process, port, directory / "redis.log")
        yield {"url": f"redis://127.0.0.1:{port}/0"}
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_serving(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith(b"+PONG"):
                    return
        except OSError:
            pass  # not listening yet
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"redis-server does not serve: {log.read_text(errors='replace')[-300:]}")
        time.sleep(0.05)
