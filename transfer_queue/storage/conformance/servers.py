"""A queue of real processes, which can be killed and come back."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue.config.derive import shard_configs
from transfer_queue.config.processes import BackendChoice, ControllerConfig, Durability, StorageUnitConfig, Timing
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.storage.conformance.process import free_ports

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
    """Controllers, which keep a journal unless ``durability`` is none, and two storage units of backend ``kind`` with
    ``capacity`` bytes each."""

    def __init__(
        self,
        kind: str,
        settings: dict[str, Any],
        directory: Path,
        capacity: int = CAPACITY,
        *,
        shards: int = 1,
        durability: Durability = "none",
    ) -> None:
        self.kind, self.settings = kind, settings
        self._directory = directory
        choice = BackendChoice(kind=kind, settings=settings)
        ports = free_ports(shards) if shards > 1 else [0]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        config = ControllerConfig(
            name="conformance",
            port=ports[0],
            metrics_port=0,
            backend=choice,
            expected_units=2,
            timing=_TIMING,
            durability=durability,
            journal=None if durability == "none" else str(directory / "journal"),
        )
        self._controller_configs = shard_configs(config, addresses, ports)
        self._controllers: list[ServerProcess] = []
        self._units: list[ServerProcess] = []
        try:
            self._controllers += [self._spawn_controller(shard) for shard in range(shards)]
            list(wait_until_serving(self._controllers, _START_S))
            addresses = [str(controller.address["address"]) for controller in self._controllers]
            self.address = addresses[0]
            self._configs = [
                StorageUnitConfig(
                    name=f"storage-{number}",
                    port=0,
                    metrics_port=0,
                    controller=addresses,
                    shards=addresses if shards > 1 else [],
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

    def kill_controller(self, shard: int) -> None:
        os.kill(self._controllers[shard].pid, signal.SIGKILL)
        self._controllers[shard].wait(10)

    def restart_controller(self, shard: int) -> None:
        self._controllers[shard] = self._spawn_controller(shard)
        list(wait_until_serving([self._controllers[shard]], _START_S))

    def stop(self) -> None:
        stop_all(self._units)
        stop_all(self._controllers)

    def _spawn_controller(self, shard: int) -> ServerProcess:
        module = "transfer_queue.runtime.controller"
        return ServerProcess(f"controller-{shard}", module, self._controller_configs[shard], self._directory)

    def _spawn(self, config: StorageUnitConfig) -> ServerProcess:
        return ServerProcess(config.name, "transfer_queue.runtime.storage_unit", config, self._directory)

    @staticmethod
    def _metric(unit: ServerProcess, name: str) -> int:
        with urllib.request.urlopen(f"http://{unit.address['metrics']}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")))
