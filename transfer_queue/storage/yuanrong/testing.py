"""What the conformance suite needs: etcd and a data system worker on free ports of the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transfer_queue.errors import StartError

__all__ = ["servers"]

_START_S = 120.0
_MEMORY_MB = 512


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """Raises StartError."""
    client, peer, port = _free_ports(3)
    with ExitStack() as running:
        running.enter_context(_etcd(directory, client, peer))
        running.enter_context(worker(directory, port, f"127.0.0.1:{client}"))
        yield {"worker": f"127.0.0.1:{port}"}


@contextmanager
def worker(directory: Path, port: int, etcd: str) -> Iterator[subprocess.Popen[bytes]]:
    """A data system worker at 127.0.0.1:``port``."""
    spec = importlib.util.find_spec("yr")
    folders = (spec.submodule_search_locations or []) if spec else []
    binary = next(
        (path for folder in folders if (path := Path(folder) / "datasystem/datasystem_worker").exists()), None
    )
    if binary is None:
        raise StartError("openYuanrong is not installed: pip install 'TransferQueue[yuanrong]'")
    if not os.access(binary, os.X_OK):  # some installers drop the mode bits of package data
        binary.chmod(binary.stat().st_mode | 0o111)
    ready = directory / "ready"
    ready.unlink(missing_ok=True)
    arguments = {
        "worker_address": f"127.0.0.1:{port}",
        "bind_address": f"127.0.0.1:{port}",
        "etcd_address": etcd,
        "shared_memory_size_mb": _MEMORY_MB,
        "log_dir": directory / "worker-log",
        "unix_domain_socket_dir": directory / "uds",
        "ready_check_path": ready,
        "health_check_path": directory / "healthy",
    }
    command = [str(binary), *(f"--{name}={value}" for name, value in arguments.items())]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent / "lib")}
    with _process(command, directory, "worker", lambda: ready.exists(), environ) as process:
        yield process


@contextmanager
def _etcd(directory: Path, client: int, peer: int) -> Iterator[None]:
    binary = shutil.which("etcd")
    if binary is None:
        raise StartError("etcd is not on the PATH: apt-get install etcd-server")
    arguments = {
        "data-dir": directory / "etcd",
        "listen-client-urls": f"http://127.0.0.1:{client}",
        "advertise-client-urls": f"http://127.0.0.1:{client}",
        "listen-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
        "initial-cluster": f"default=http://127.0.0.1:{peer}",
    }
    command = [binary, *(f"--{name}={value}" for name, value in arguments.items())]
    with _process(command, directory, "etcd", lambda: _listens(client), dict(os.environ)):
        yield


@contextmanager
def _process(
    command: list[str], directory: Path, name: str, serves: Callable[[], bool], environ: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    path = directory / f"{name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=environ
        )
    try:
        deadline = time.monotonic() + _START_S
        while not serves():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"{name} does not serve: {path.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
