"""A write reaches only the object that was seen, whatever somebody else does between the look and the write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import config

from tests.integration.operator.conftest import chart_plane
from tests.integration.operator.control_plane import ControlPlane
from tests.unit.operator.queues import IMAGES, document
from tests.waiting import wait_until
from tq_operator.plan.children import desired_children
from tq_operator.plan.queue import Manifest, queue_from
from tq_operator.runtime.cluster import Cluster, StaleError
from tq_operator.runtime.reconciler import Reconciler

pytestmark = pytest.mark.timeout(1200)  # the first run builds Kubernetes

FOREIGN = {"labels": {"made-by": "somebody-else"}}


class Interrupted(Cluster):
    """Somebody else acts right before the first write to a Service of the queue."""

    act: Any = None

    def call(self, method: str, path: str, *arguments: Any, **options: Any) -> Manifest:
        if method in ("PATCH", "POST") and "/services/" in f"{path}/" and self.act is not None:
            act, self.act = self.act, None
            act()
        return super().call(method, path, *arguments, **options)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One of its own: on the shared one another operator may be running."""
    with chart_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture
def cluster(plane: ControlPlane) -> Interrupted:
    return Interrupted(config.new_client_from_config(str(plane.kubeconfig)))


def foreign_service(plane: ControlPlane, name: str) -> None:
    spec = {"ports": [{"port": 1}], "selector": {"app": "other"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default", **FOREIGN}}
    plane.apply(json.dumps({**service, "spec": spec}))


def test_a_child_that_somebody_else_made_meanwhile_is_not_taken_over(plane: ControlPlane, cluster: Interrupted) -> None:
    name = "seen"
    metadata = {"name": name, "namespace": "default"}
    plane.apply(json.dumps({**document("{backend: {simple: {}}}"), "metadata": metadata}))
    reconciler = Reconciler(cluster, IMAGES, (), "test")
    service = f"{name}-storage"

    def look() -> bool:
        try:
            return reconciler.reconcile(("default", name))
        except StaleError:
            return False

    def condition() -> tuple[str, str]:
        found = (plane.get("transferqueue", name) or {})["status"]["conditions"]
        return next((entry["status"], entry["reason"]) for entry in found if entry["type"] == "Degraded")

    try:
        cluster.act = lambda: foreign_service(plane, f"{name}-controller")
        assert not look(), "somebody was faster than the creation"
        look()
        assert condition() == ("True", "NameConflict")
        found = plane.get("service", f"{name}-controller") or {}
        assert found["spec"]["selector"] == {"app": "other"}
        assert "ownerReferences" not in found["metadata"]
        plane.kubectl("delete", "service", f"{name}-controller")
        wait_until(look, "the queue has its own")
        assert (plane.get("service", service) or {})["metadata"]["ownerReferences"][0]["name"] == name

        def replace() -> None:
            plane.kubectl("delete", "service", service)
            foreign_service(plane, service)

        patch = [{"op": "add", "path": "/spec/selector/foreign", "value": "x"}]
        plane.kubectl("patch", "service", service, "--type=json", "-p", json.dumps(patch))
        cluster.act = replace
        assert not look(), "it was replaced before the repair"
        assert (plane.get("service", service) or {})["spec"]["selector"] == {"app": "other"}
        look()
        assert condition() == ("True", "NameConflict")
    finally:
        plane.kubectl("delete", "transferqueue", name, "--wait=false")
        for left in (service, f"{name}-controller"):
            plane.kubectl("delete", "service", left)


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "Service", "PersistentVolumeClaim"])
def test_creation_and_change_have_their_preconditions(plane: ControlPlane, cluster: Cluster, kind: str) -> None:
    text = document("{backend: {simple: {}}, controller: {durability: node}}", f"pre-{kind.lower()}", "default")
    manifest = next(each for each in desired_children(queue_from(text), IMAGES) if each["kind"] == kind)
    manifest["metadata"].pop("ownerReferences")
    made = cluster.apply(manifest, None)
    assert {(entry["manager"], entry["operation"]) for entry in made["metadata"]["managedFields"]} == {
        ("transferqueue-operator", "Apply")
    }
    with pytest.raises(StaleError):
        cluster.apply(manifest, None)
    changed = {**manifest, "metadata": {**manifest["metadata"], "annotations": {"a": "b"}}}
    assert cluster.apply(changed, made)["metadata"]["annotations"]["a"] == "b"
    cluster.delete(made)
    with pytest.raises(StaleError):
        cluster.apply(manifest, {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}})
