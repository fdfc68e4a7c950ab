"""Any write may fail: the next look at the queue makes up for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client, config

from tests.integration.operator.control_plane import ControlPlane
from tests.unit.operator.queues import IMAGES
from tq_operator.runtime.cluster import Cluster, ClusterError
from tq_operator.runtime.reconciler import Reconciler

pytestmark = pytest.mark.timeout(1200)

QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec: {backend: {mooncake: {globalSegmentSize: 256Mi}}}
"""
_names = itertools.count()


class FailingCluster(Cluster):
    """Chosen writes fail: before the apiserver sees them, or, with ``late``, once it has carried them out."""

    def __init__(self, api: client.ApiClient, fails: Callable[[int], bool], status: int, late: bool) -> None:
        super().__init__(api)
        self.writes = 0
        self._fails, self._status, self._late = fails, status, late

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "GET":
            return super().call(method, *arguments, **options)
        self.writes += 1
        if not self._fails(self.writes):
            return super().call(method, *arguments, **options)
        if self._late:
            super().call(method, *arguments, **options)
        raise ClusterError(f"{self._status}: as the test wants it")


def settle(plane: ControlPlane, fails: Callable[[int], bool], status: int, late: bool) -> int:
    """Create a queue, and reconcile it as its worker would. Gives the number of writes."""
    name = f"failing-{next(_names)}"
    plane.apply(QUEUE.replace("NAME", name))
    cluster = FailingCluster(config.new_client_from_config(str(plane.kubeconfig)), fails, status, late)
    reconciler = Reconciler(cluster, IMAGES, (), "test")
    try:
        for _ in range(60):
            before = cluster.writes
            try:
                settled = reconciler.reconcile(("default", name))
            except ClusterError:  # the status could not be written: the worker tries again
                settled = False
            if settled and cluster.writes == before:
                break
        else:
            raise AssertionError("it never comes to rest")
        found = cluster.queue("default", name)
        assert found is not None
        assert len(cluster.children("default", name)) == 9
        conditions = {entry["type"]: entry["reason"] for entry in found["status"]["conditions"]}
        assert conditions["Degraded"] == "AsExpected"
        return cluster.writes
    finally:
        plane.kubectl("delete", "transferqueue", name, "--wait=false")


def test_a_queue_comes_to_rest_whichever_write_fails(plane: ControlPlane) -> None:
    undisturbed = settle(plane, lambda _: False, 0, False)
    for failing in range(1, undisturbed + 1):
        status = (409, 429, 500)[failing % 3]
        settle(plane, lambda number, failing=failing: number == failing, status, late=failing % 2 == 0)  # type: ignore[misc]


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("status", [409, 429, 500])
def test_a_queue_comes_to_rest_though_every_kth_write_fails(plane: ControlPlane, every: int, status: int) -> None:
    settle(plane, lambda number: number % every == 0, status, late=status == 500)
