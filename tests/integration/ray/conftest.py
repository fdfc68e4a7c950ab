from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

import transfer_queue as tq
from tests.integration.ray.cluster import CONF, ENVIRONMENT, RayCluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    running = RayCluster()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def driver(cluster: RayCluster) -> Iterator[RayCluster]:
    """This process as a driver of the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TQ_CONFIG_FILE", "TQ_CONTROLLER_ADDRESS"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        assert "TQ_CONFIG_FILE" not in os.environ
        ray.init(cluster.address, namespace="tests", log_to_driver=False)
        yield cluster
        tq.close()
        ray.shutdown()


@pytest.fixture
def queue(driver: RayCluster) -> Iterator[RayCluster]:
    """A queue that this process starts."""
    assert tq.init(CONF) is not None
    yield driver
    tq.close()
