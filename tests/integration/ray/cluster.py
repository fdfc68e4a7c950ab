"""A Ray cluster of one node on the loopback address, and driver programs that use it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests import preloaded
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.2"
"""A loopback address that Ray does not translate to that of the network."""
STORE_BYTES = 256 << 20
CONF = {"backend": {"SimpleStorage": {"unit_capacity": "16Mi"}}}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",  # nothing is written to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_local_fs_capacity_threshold": "1",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "180",  # 30 is too few on a busy machine
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class _RayStart:
    """``ray start`` in the foreground, so that all of it ends with one process of ours."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ray = shutil.which("ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert ray is not None, "the ray command is not installed"
        self._log = folder / "start.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [ray, "start", "--block", "--disable-usage-stats", f"--object-store-memory={STORE_BYTES}", *arguments],
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
            )

    def check(self) -> None:
        assert self._process.poll() is None, self._log.read_text()

    def stop(self, *, at_once: bool = False) -> None:
        """End it in order, or ``at_once`` as a node that fails. Idempotent."""
        if self._process.poll() is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        if at_once:
            for process in family:
                process.kill()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()


class RayCluster:
    """A head node, and others on further loopback addresses."""

    def __init__(self, cpus: int = 8) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tqray-", dir="/tmp"))  # a short path: sockets lie in it
        self.port, self.client_port = _free_port(), _free_port()
        self._head = _RayStart(
            self.folder,
            *("--head", f"--node-ip-address={HOST}", f"--port={self.port}", f"--num-cpus={cpus}"),
            *(f"--ray-client-server-port={self.client_port}", "--include-dashboard=false"),
            f"--temp-dir={self.folder}",
        )
        for port in (self.port, self.client_port):
            wait_until(lambda port=port: self._listens(port), f"Ray listens on port {port}", 120)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def client_address(self) -> str:
        return f"ray://{HOST}:{self.client_port}"

    def add_node(self, host: str, cpus: int, resources: dict[str, float]) -> _RayStart:
        """A further node; the caller waits for it and stops it."""
        return _RayStart(
            self.folder,
            *(f"--address={self.address}", f"--node-ip-address={host}", f"--num-cpus={cpus}"),
            f"--resources={json.dumps(resources)}",
        )

    def _listens(self, port: int) -> bool:
        self._head.check()
        with socket.socket() as probe:
            return probe.connect_ex((HOST, port)) == 0

    def stop(self) -> None:
        self._head.stop()
        shutil.rmtree(self.folder)


class Driver:
    """A program of its own that uses the cluster; ``report`` prints values for the test to read."""

    PRELUDE = """
import json, sys, torch, ray, transfer_queue as tq
from tensordict import TensorDict
def report(**values): print("REPORT " + json.dumps(values), flush=True)
def servers(name="TransferQueueController"):
    controller = ray.get_actor(name, "transfer_queue")
    return [ray.get(actor.pid.remote()) for actor in [controller, *ray.get(controller.units.remote())]]
def column(*rows): return TensorDict({"x": torch.tensor(rows)}, batch_size=[len(rows)])
"""

    def __init__(self, program: str, address: str) -> None:
        connect = f"ray.init({address!r}, namespace='another', log_to_driver=False)\n"
        self._process = preloaded.Popen(
            [sys.executable, "-c", self.PRELUDE + connect + program],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def report(self) -> dict[str, Any]:
        """What the program reports next."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            if line.startswith("REPORT "):
                return dict(json.loads(line.removeprefix("REPORT ")))
        raise AssertionError(self._process.stderr.read())

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self.kill()

    def finish(self) -> None:
        """Let it go on from ``sys.stdin.read()`` to its end."""
        _, errors = self._process.communicate(timeout=180)
        assert self._process.returncode == 0, errors


def wait_for_end(pids: list[int]) -> None:
    """Until none of the processes is there any more."""
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"processes {pids} end", 120)
