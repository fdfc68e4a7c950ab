"""What the conformance suite needs: a Redis server on a free port of the loopback interface."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transfer_queue.errors import StartError
from transfer_queue.storage.conformance.process import free_ports, running

__all__ = ["servers"]


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """A server that keeps nothing on disk. Raises StartError."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise StartError("redis-server is not installed: apt-get install redis-server")
    (port,) = free_ports(1)
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with running("redis", command, directory, lambda: _answers(port)):
        yield {"url": f"redis://127.0.0.1:{port}/0"}


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False  # not listening yet
