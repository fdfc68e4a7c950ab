"""A real etcd on free ports of the loopback interface."""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transfer_queue.storage.conformance.process import free_ports, running

__all__ = ["etcd_binary", "running_etcd"]


def etcd_binary() -> str:
    """From the PATH, or the test cluster's build."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = sorted(cache.glob("transferqueue/cluster/*/bin/etcd"))
    found = shutil.which("etcd") or (str(built[0]) if built else None)
    assert found, "etcd is not installed: scripts/setup, or apt-get install etcd-server"
    return found


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Gives host:port for clients."""
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    arguments = {
        "data-dir": folder / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    command = [etcd_binary(), *(f"--{name}={value}" for name, value in arguments.items())]
    with running("etcd", command, folder, lambda: _is_healthy(client)):
        yield client.removeprefix("http://")


def _is_healthy(client: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{client}/health", timeout=2) as answer:
            return b'"true"' in answer.read()
    except (OSError, urllib.error.URLError):
        return False
