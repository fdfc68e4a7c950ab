"""A real mooncake_master on free ports of the loopback interface, storage units in processes, clients in the test."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transfer_queue.columns.block import EncodedBlock
from transfer_queue.columns.tensors import encode
from transfer_queue.storage.base import UnitInfo
from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

FREE_PORTS = {"rpcPort": 0, "httpMetadataPort": 0, "metricsPort": 0}
MIB = 2**20
ROOT = Path(__file__).resolve().parents[3]
CAPACITY = 256 * MIB


async def eventually(
    attempt: Callable[[], Awaitable[Any]],
    errors: type[Exception] | tuple[type[Exception], ...],
    timeout_s: float = 30.0,
) -> Any:
    """The first result of ``attempt`` that is not one of ``errors``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await attempt()
        except errors:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def settings_of(endpoints: MasterEndpoints, **changes: Any) -> dict[str, Any]:
    buffers = {"tensorBufferSize": "128Mi", "bytesBufferSize": "128Mi"}
    return {**endpoints.settings(), "protocol": "tcp", "zeroCopy": buffers, "startTimeout": 20, **changes}


class Driven:
    """A process that is driven by JSON lines, of a module in this folder. ``ready``: what it said once it was."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.integration.mooncake.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._answers: queue.Queue[list[Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            kind, self.ready = self._answers.get(timeout=60)
            assert kind == "ready", self.ready
        except BaseException:
            self.kill()
            raise

    def tell(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: Any, timeout_s: float = 60) -> Any:
        self.tell(*words)
        return self._answers.get(timeout=timeout_s)[1]

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def hear(self, words: list[Any]) -> None:
        self._answers.put(words)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):  # old engines log here
                self.hear(json.loads(line))


class Unit(Driven):
    """See unit_process.py."""

    def __init__(self, settings: dict[str, Any], number: int = 0, capacity: int = CAPACITY) -> None:
        self.losses = self.doubts = 0
        super().__init__("unit_process", json.dumps(settings), f"unit-{number}", str(capacity))
        self.info = UnitInfo(number, f"unit-{number}", "", capacity, attributes=self.ready)

    def hear(self, words: list[Any]) -> None:
        if words[0] == "lost":
            self.losses += 1
        elif words[0] == "in doubt":
            self.doubts += 1
        else:
            super().hear(words)


def block_of_bytes(nbytes: int, seed: int = 0) -> EncodedBlock:
    """One dense column of random bytes in 64 rows."""
    values = np.random.default_rng(seed).integers(0, 256, (64, nbytes // 64), np.uint8)
    return encode({"x": torch.from_numpy(values)})


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture(scope="package")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterEndpoints]:
    process = MasterProcess(MasterSettings(**FREE_PORTS), tmp_path_factory.mktemp("master") / "master.log")
    yield process.start()
    process.stop()


@pytest.fixture(scope="package")
def units(master: MasterEndpoints) -> Iterator[list[Unit]]:
    started = [Unit(settings_of(master), number) for number in range(2)]
    yield started
    for unit in started:
        unit.end()


@pytest.fixture
def start_unit() -> Iterator[Callable[..., Unit]]:
    """Makes units that are killed at the end, so that a test may do anything to their master."""
    started: list[Unit] = []

    def start(settings: dict[str, Any], number: int = 0, capacity: int = 64 * MIB) -> Unit:
        started.append(Unit(settings, number, capacity))
        return started[-1]

    yield start
    for unit in started:
        unit.kill()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MasterProcess]:
    """A master that the test may kill; not started yet."""
    process = MasterProcess(MasterSettings(**FREE_PORTS), tmp_path / "master.log")
    yield process
    process.stop()
