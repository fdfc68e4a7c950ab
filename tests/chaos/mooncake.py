"""Cells of the fault matrix for what Mooncake needs beside storage units. Each has a queue of its own."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.load import Load
from tests.integration.etcd import Etcd
from tests.integration.mooncake.conftest import FREE_PORTS
from tests.integration.stack import running_stack
from tests.waiting import wait_until
from transfer_queue.storage.mooncake.master import MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

__all__ = ["CELLS", "MooncakeCell"]

TIMING = {"heartbeat": 0.3, "peerTimeout": 10.0, "reconnectGrace": 20.0}
DEADLINE_S = 120.0


class Services:
    """mooncake_master, and an etcd for the metadata of its segments."""

    def __init__(self, folder: Path) -> None:
        self.etcd = Etcd(folder)
        self._folder = folder
        self._master = MasterProcess(MasterSettings(**FREE_PORTS), folder / "master.log")

    def start(self) -> dict[str, object]:
        """Settings of the backend."""
        self.etcd.start()
        endpoints = self._master.start()
        self._ports = {
            "rpcPort": endpoints.master_server_address,
            "httpMetadataPort": endpoints.metadata_server.split("/")[2],
            "metricsPort": endpoints.admin_address,
        }
        settings = {**endpoints.settings(), "metadataServer": f"etcd://{self.etcd.address}", "protocol": "tcp"}
        return {**settings, "zeroCopy": {"tensorBufferSize": "32Mi", "bytesBufferSize": "32Mi"}, "startTimeout": 20}

    def restart_master(self) -> None:
        """Kill it; the next one knows nothing."""
        os.kill(self._master.pid or 0, signal.SIGKILL)
        self._master.stop()
        ports = {name: int(address.rpartition(":")[2]) for name, address in self._ports.items()}
        self._master = MasterProcess(MasterSettings(**ports), self._folder / "next.log")
        self._master.start()

    def restart_etcd(self) -> None:
        self.etcd.kill()
        self.etcd.start()

    def stop(self) -> None:
        self._master.stop()
        self.etcd.stop()


@contextmanager
def running_services() -> Iterator[Services]:
    with ExitStack() as exits:
        services = Services(Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="tq-test-"))))
        exits.callback(services.stop)
        yield services


@dataclass(frozen=True)
class MooncakeCell:
    """``lossy``: what was acknowledged before the fault may be lost with its segment, and is then reported."""

    part: str
    lossy: bool
    fault: str = "kill -9"

    @property
    def name(self) -> str:
        return f"{self.part}: {self.fault}"

    def run(self, bound_s: float) -> tuple[int, float]:
        """Rows acknowledged, and seconds until rows went through again after the fault."""
        with running_services() as services:
            backend = {"kind": "mooncake", "settings": services.start()}
            with (
                running_stack(units=1, capacity="64Mi", backend=backend, timing=TIMING) as stack,
                Load(stack.address, lossy=self.lossy, together=True) as load,
            ):
                _wait_for_rows(load, 60, f"{self.name}: load runs before", DEADLINE_S)
                {"mooncake_master": services.restart_master, "etcd": services.restart_etcd}[self.part]()
                over = time.monotonic()
                _wait_for_rows(load, 60, f"{self.name}: rows go through again", bound_s)
                recovery = time.monotonic() - over
                doubtful = set(load.acknowledged)
                _wait_for_rows(load, 60, f"{self.name}: load runs after", DEADLINE_S)
                load.drain(3.0 if self.lossy else DEADLINE_S)
        missing = set(load.acknowledged) - set(load.delivered)
        assert load.errors == [], self.name
        assert load.wrong == [], self.name
        assert missing <= (doubtful if self.lossy else set()), self.name
        assert [row for row, times in Counter(load.delivered).items() if times > 1] == [], self.name
        return len(load.acknowledged), recovery


def _wait_for_rows(load: Load, more: int, what: str, timeout_s: float) -> None:
    put, got = len(load.acknowledged) + more, len(load.delivered) + more
    wait_until(
        lambda: (len(load.acknowledged) >= put and len(load.delivered) >= got) or bool(load.errors), what, timeout_s
    )
    assert load.errors == [], what


CELLS = [MooncakeCell("mooncake_master", lossy=True), MooncakeCell("etcd", lossy=False)]
