"""A queue of real processes, whose storage units can be killed and come back."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.config.processes import BackendChoice, ControllerConfig, StorageUnitConfig, Timing
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving

__all__ = ["CAPACITY", "Servers", "wait_until"]

CAPACITY = 64 << 20
"""Bytes of each storage unit."""
_START_S = 120.0
_TIMING = Timing(heartbeat=0.5, peer_timeout=60.0, reconnect_grace=30.0)
"""Long timeouts: on a busy machine, a slow process must not be declared dead."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of ``condition``; AssertionError naming ``what`` after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
    return value


class Servers:
    """A controller and two storage units of backend ``kind`` with ``capacity`` bytes each."""

    def __init__(self, kind: str, settings: dict[str, Any], directory: Path, capacity: int = CAPACITY) -> None:
        self._directory = directory
        choice = BackendChoice(kind=kind, settings=settings)
        config = ControllerConfig(
            name="conformance", port=0, metrics_port=0, backend=choice, expected_units=2, timing=_TIMING
        )
        self._controller = ServerProcess("controller", "transfer_queue.runtime.controller", config, directory)
        self._units: list[ServerProcess] = []
        try:
            list(wait_until_serving([self._controller], _START_S))
            self.address = str(self._controller.address["address"])
            self._configs = [
                StorageUnitConfig(
                    name=f"storage-{number}",
                    port=0,
                    metrics_port=0,
                    controller=[self.address],
                    start_timeout=_START_S,
                    backend=choice,
                    capacity=capacity,
                    prefault=False,
                    timing=_TIMING,
                )
                for number in range(2)
            ]
            self._units += [self._spawn(config) for config in self._configs]
            list(wait_until_serving(self._units, _START_S))
        except BaseException:
            self.stop()
            raise

    def used(self) -> int:
        """Bytes held by all storage units, by their own account."""
        return sum(self._metric(unit, "tq_unit_used_bytes") for unit in self._units)

    def kill_units(self) -> None:
        for unit in self._units:
            os.kill(unit.pid, signal.SIGKILL)
            unit.wait(10)

    def restart_units(self) -> None:
        self._units = [self._spawn(config) for config in self._configs]
        list(wait_until_serving(self._units, _START_S))

    def stop(self) -> None:
        stop_all(self._units)
        stop_all([self._controller])

    def _spawn(self, config: StorageUnitConfig) -> ServerProcess:
        return ServerProcess(config.name, "transfer_queue.runtime.storage_unit", config, self._directory)

    @staticmethod
    def _metric(unit: ServerProcess, name: str) -> int:
        with urllib.request.urlopen(f"http://{unit.address['metrics']}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")))
