"""What the conformance suite needs: etcd and a data system worker on free ports of the loopback interface."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from transfer_queue.errors import StartError
from transfer_queue.storage.conformance.process import free_ports, running

__all__ = ["servers"]

_MEMORY_MB = 512
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """Raises StartError."""
    client, peer, port = free_ports(3)
    with ExitStack() as stack:
        stack.enter_context(_etcd(directory, client, peer))
        stack.enter_context(worker(directory, port, f"127.0.0.1:{client}"))
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
    with running("worker", command, directory, ready.exists, environ) as process:
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
    with running("etcd", command, directory, lambda: _is_healthy(client)):
        yield


def _is_healthy(port: int) -> bool:
    """Whether etcd has a leader. It listens before, and a worker that asks it then ends."""
    with suppress(OSError), _DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(json.load(answer)["health"] == "true")
    return False
