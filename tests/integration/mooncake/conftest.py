"""A real mooncake_master on free ports of the loopback interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings

FREE_PORTS = {"rpcPort": 0, "httpMetadataPort": 0, "metricsPort": 0}


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll ``condition``; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not hold in time"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterEndpoints]:
    process = MasterProcess(MasterSettings(**FREE_PORTS), tmp_path_factory.mktemp("master") / "master.log")
    yield process.start()
    process.stop()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MasterProcess]:
    """A master that the test may kill; not started yet."""
    process = MasterProcess(MasterSettings(**FREE_PORTS), tmp_path / "master.log")
    yield process
    process.stop()
