"""What the conformance suite needs: a Ray cluster of one node on the loopback interface."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from transfer_queue.errors import StartError
from transfer_queue.storage.conformance.process import free_ports, listens, running

__all__ = ["servers"]

_HOST = "127.0.0.2"
"""A loopback address that Ray does not translate to that of the network."""
_CPUS = 8
_STORE_BYTES = 256 << 20
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # nothing is written to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_local_fs_capacity_threshold": "1",
}


@contextmanager
def servers(directory: Path) -> Iterator[dict[str, Any]]:
    """A head node; this process and its children find its settings in their environment. Raises StartError."""
    binary = shutil.which("ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if binary is None:
        raise StartError("the ray command is not installed: pip install 'TransferQueue[ray]'")
    (port,) = free_ports(1, _HOST)
    folder = tempfile.mkdtemp(prefix="tqray-", dir="/tmp")  # a short path: sockets lie in it
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    command = [
        *(binary, "start", "--block", "--head", "--disable-usage-stats", "--include-dashboard=false"),
        *(f"--node-ip-address={_HOST}", f"--port={port}", f"--num-cpus={_CPUS}"),
        *(f"--object-store-memory={_STORE_BYTES}", f"--temp-dir={folder}"),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the owners import this package
    try:
        with running("ray", command, directory, lambda: listens(port, _HOST), environ):
            yield {"address": f"{_HOST}:{port}"}
            ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
