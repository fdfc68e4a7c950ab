"""Real server processes for tests: started, watched, killed."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import artefacts, preloaded
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TIMING = {"heartbeat": 0.3, "peerTimeout": 3.0, "reconnectGrace": 1.0}


class Process:
    """One server process."""

    def __init__(self, module: str, config: dict[str, Any], folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / f"{name}.json"
        self.path.write_text(json.dumps(config))
        self.log = folder / f"{name}.log"
        self.module = module
        self._secure = "security" in config
        self.ready: dict[str, Any] = {}
        self.environ: dict[str, str] = {}
        """Besides that of the tests."""
        self.spawn()

    def spawn(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **self.environ}
        command = [sys.executable, "-m", self.module, "--config", str(self.path), "--die-with-parent"]
        # A forked process shows the environment and the command line of what it was forked from, and loads no library
        # that its own environment names.
        popen = subprocess.Popen if self._secure or self.environ else preloaded.ServerPopen
        with self.log.open("ab") as log:
            self.process = popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=ROOT
            )

    def wait_ready(self, timeout_s: float = 90.0) -> Process:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline().decode() if readable else ""
        assert line.startswith("READY "), f"{self.name}: {line!r} {self.log.read_text()}"
        self.ready = json.loads(line.removeprefix("READY "))
        return self

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._close_pipes()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._close_pipes()
        return code

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def http(self, path: str) -> tuple[int, str]:
        """Status and body of a GET on the metrics port."""
        try:
            with urllib.request.urlopen(f"http://{self.ready['metrics']}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        for line in self.http("/metrics")[1].splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def wait_prefaulted(self) -> None:
        """All pages of the arena are in memory."""
        arenas = list(Path("/dev/shm").glob(f"tq-{self.name}-{self.process.pid}-*"))
        assert len(arenas) == 1, arenas
        size = arenas[0].stat().st_size
        wait_until(lambda: arenas[0].stat().st_blocks * 512 >= size, "arena is prefaulted", 120)


class Stack:
    """A controller and storage units."""

    def __init__(
        self,
        *,
        units: int = 2,
        capacity: str = "64Mi",
        settings: dict[str, Any] | None = None,
        prefault: bool = False,
        durability: str = "none",
        security: dict[str, Any] | None = None,
        listen: dict[str, Any] | None = None,
        **controller: Any,
    ) -> None:
        """``listen``: settings of all of them; ``controller``: of the controller."""
        self.folder = Path(tempfile.mkdtemp(prefix="tq-test-"))
        self._durability = durability
        self._security = {"security": security} if security else {}
        self._listen = listen or {}
        self.arenas = Path(tempfile.mkdtemp(prefix="tq-test-", dir="/dev/shm"))
        self._unit_count = units
        self._capacity = capacity
        self._prefault = prefault
        self._controller_config = {
            "port": 0,
            "metricsPort": 0,
            "backend": {"kind": "simple", "settings": settings or {}},
            "expectedUnits": units,
            "timing": TIMING,
            "durability": durability,
            **self._listen,
            **self._security,
            **({"journal": str(self.folder / "journal")} if durability != "none" else {}),
            **controller,
        }
        self.units: list[Process] = []
        self.controller: Process
        artefacts.follow(self, artefacts.logs(self.folder))

    def start(self) -> Stack:
        self.controller = Process(
            "transfer_queue.runtime.controller", self._controller_config, self.folder, "controller"
        ).wait_ready()
        for number in range(self._unit_count):
            self.add_unit(f"u{number}", wait=False)
        for unit in self.units:
            unit.wait_ready()
        return self

    @property
    def address(self) -> str:
        return str(self.controller.ready["address"])

    def address_for_units(self) -> str:
        """Where storage units reach the controller."""
        return self.address

    def add_unit(self, name: str, wait: bool = True) -> Process:
        config = {
            "name": name,
            "port": 0,
            "metricsPort": 0,
            "controller": [self.address_for_units()],
            "capacity": self._capacity,
            "prefault": self._prefault,
            "timing": TIMING,
            "durability": self._durability,
            **self._listen,
            **self._security,
            **(
                {"backend": self._controller_config["backend"]}
                if self._controller_config["backend"]["kind"] != "simple"
                else {}
            ),
            **({"directory": str(self.arenas)} if self._durability != "none" else {}),
        }
        unit = Process("transfer_queue.runtime.storage_unit", config, self.folder, name)
        self.units.append(unit)
        return unit.wait_ready() if wait else unit

    def restart_controller(self) -> None:
        """After it was killed: at the same address."""
        port = int(self.address.rsplit(":", 1)[1])
        self.controller.path.write_text(json.dumps({**self._controller_config, "port": port}))
        self.controller.spawn()
        self.controller.wait_ready()

    def used(self) -> float:
        """Bytes held by all living units."""
        return sum(unit.metric("tq_unit_used_bytes") for unit in self.units if unit.process.poll() is None)

    def stop(self) -> None:
        for process in [*self.units, self.controller]:
            process.stop()
        artefacts.leave(self)
        shutil.rmtree(self.folder)
        shutil.rmtree(self.arenas)


@contextmanager
def running_stack(**settings: Any) -> Iterator[Stack]:
    stack = Stack(**settings)
    try:
        yield stack.start()
    finally:
        stack.stop()
