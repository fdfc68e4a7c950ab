"""A real etcd on free ports of the loopback interface."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transfer_queue.storage.conformance.process import free_ports, running

__all__ = ["Etcd", "etcd_binary", "running_etcd"]


def etcd_binary() -> str:
    """From the PATH, or the test cluster's build."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = sorted(cache.glob("transferqueue/cluster/*/bin/etcd"))
    found = shutil.which("etcd") or (str(built[0]) if built else None)
    assert found, "etcd is not installed: scripts/setup, or apt-get install etcd-server"
    return found


class Etcd:
    """An etcd with its data in ``folder``; it may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        arguments = {
            "data-dir": folder / "etcd",
            "listen-client-urls": self._client,
            "advertise-client-urls": self._client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",  # tests kill processes, not machines, and other tests keep the disk busy
        }
        self._command = [etcd_binary(), *(f"--{name}={value}" for name, value in arguments.items())]
        self._exits = ExitStack()
        self.process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """host:port for clients."""
        return self._client.removeprefix("http://")

    def start(self) -> None:
        serves = running("etcd", self._command, self._folder, lambda: _is_healthy(self._client))
        self.process = self._exits.enter_context(serves)

    def keys(self, prefix: str) -> list[str]:
        """Those that begin with ``prefix``, which must not be empty."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        words = {"key": prefix, "range_end": end}
        encoded = {name: base64.b64encode(word.encode()).decode() for name, word in words.items()}
        request = urllib.request.Request(f"{self._client}/v3/kv/range", json.dumps(encoded).encode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return [base64.b64decode(each["key"]).decode() for each in json.load(answer).get("kvs", [])]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self._exits.close()


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Gives host:port for clients."""
    etcd = Etcd(folder)
    try:
        etcd.start()
        yield etcd.address
    finally:
        etcd.stop()


def _is_healthy(client: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{client}/health", timeout=2) as answer:
            return b'"true"' in answer.read()
    except (OSError, urllib.error.URLError):
        return False
