"""Whatever somebody changes in the children of a queue, they are soon as the queue wants them."""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kubernetes import config
from kubernetes.dynamic.exceptions import ConflictError

from tests.integration.operator.conftest import Operator, environment
from tests.integration.operator.control_plane import ControlPlane, free_port, process
from tests.integration.operator.drift import BACK_S, QUEUES, Actor, Watcher, children_of, is_ready, kubelet, until_back
from tests.waiting import wait_until
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import CHILD_KINDS, Cluster

pytestmark = pytest.mark.timeout(1200)

NAMESPACE = "drifting"
QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: drifting}
spec: SPEC
"""
CHANGES = int(os.environ.get("TQ_DRIFT_CHANGES", "60"))
SEED = int(os.environ.get("TQ_DRIFT_SEED", "1"))


@pytest.fixture
def drifting(
    plane: ControlPlane, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operator]:
    """An operator that looks at all queues every five minutes only, as in the chart, and two queues in a namespace of
    the test's own: one that ends takes long."""
    monkeypatch.setattr(f"{__name__}.NAMESPACE", f"drifting-{uuid.uuid4().hex[:6]}")
    webhook, health = free_port(), free_port()
    variables = environment(plane, certificates, webhook, health, TQ_RESYNC_SECONDS="300")
    plane.kubectl("create", "namespace", NAMESPACE)
    with process([sys.executable, "-m", "tq_operator"], tmp_path / "log", **variables) as child:
        running = Operator(plane, child, health, tmp_path / "log", webhook)
        wait_until(running.ready, "the operator is ready")
        for name, spec in QUEUES.items():
            plane.apply(QUEUE.replace("drifting", NAMESPACE).replace("NAME", name).replace("SPEC", spec))
        yield running
        plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_every_change_of_any_field_of_any_child_is_taken_back(
    drifting: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(config.new_client_from_config(str(drifting.plane.kubeconfig)))
    actor, watcher = Actor(cluster, random.Random(SEED)), Watcher()

    def all_ready() -> bool:
        return all(is_ready(cluster.queue(NAMESPACE, name) or {}) for name in QUEUES)

    with kubelet(cluster, NAMESPACE):
        wait_until(all_ready, "the queues are ready")
        before = {name: children_of(cluster, NAMESPACE, name) for name in QUEUES}
        with watcher.watching(cluster, NAMESPACE):
            for number in range(CHANGES):
                name = sorted(QUEUES)[number % 2]
                words = actor.change(NAMESPACE, name)

                why = until_back(cluster, NAMESPACE, name, before[name], BACK_S)
                assert not why, f"change {number} of seed {SEED}: {words}. {why}"
        wait_until(all_ready, "the queues are ready again", BACK_S)
    with capsys.disabled():
        print(f" {CHANGES} changes; Ready without endpoints for {watcher.longest_s:.1f} s at most ", end="")
    assert watcher.longest_s < BACK_S, watcher.worst


def test_changes_of_objects_without_managed_fields_are_taken_back(drifting: Operator) -> None:
    """Nothing records who made them, and ours beside them may not be valid."""
    cluster = Cluster(config.new_client_from_config(str(drifting.plane.kubeconfig)))

    def change(kind: str, name: str, edit: Callable[[Manifest], None] = lambda spec: None) -> None:
        prefix, plural = CHILD_KINDS[kind]
        path = f"{prefix}/namespaces/{NAMESPACE}/{plural}/{name}"

        def put() -> bool:
            found = cluster.call("GET", path)
            found["metadata"]["managedFields"] = [{}]
            edit(found.get("spec", {}))
            with suppress(ConflictError):
                cluster.call("PUT", path, found, [("fieldManager", "kubectl-edit")])
                return True
            return False

        wait_until(put, f"{path} is changed")

    def change_the_pods(spec: Manifest) -> None:
        pod = spec["template"]["spec"]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "tls")
        volume["emptyDir"] = {"medium": volume.pop("secret") and "Memory"}
        pod["hostNetwork"] = True
        pod["containers"][0]["ports"] = []

    def change_the_port(spec: Manifest) -> None:
        spec["ports"] = [{"name": spec["ports"][0]["name"], "port": 1234}]

    with kubelet(cluster, NAMESPACE):
        for queue in QUEUES:
            wait_until(lambda queue=queue: is_ready(cluster.queue(NAMESPACE, queue) or {}), "the queues are ready")
        before = {queue: children_of(cluster, NAMESPACE, queue) for queue in QUEUES}
        for kind, name in before["plain"]:
            change(kind, name)
        change("NetworkPolicy", "plain-access", lambda spec: spec.update(egress=[{}]))
        change("StatefulSet", "cold-storage", change_the_pods)
        change("Service", "cold-controller", change_the_port)
        for queue in QUEUES:
            assert not until_back(cluster, NAMESPACE, queue, before[queue], BACK_S)
