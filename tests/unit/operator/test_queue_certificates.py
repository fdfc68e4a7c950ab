"""Secrets of a queue's certificates in many namespaces: what stands in the way in one is no matter of the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES, document
from tests.unit.operator.test_watched import KEY, QUEUES, pod
from tq_operator.plan.queue import queue_from
from tq_operator.runtime.cluster import ForbiddenError
from tq_operator.runtime.reconciler import Reconciler

SPEC = "{backend: {simple: {}}, access: {namespaces: ['*']}, security: {tls: {mode: MODE}}}"
OPERATOR, ISSUER = SPEC.replace("MODE", "operator"), SPEC.replace("MODE", "issuer, issuerRef: {name: ca}")
ENDING = "forbidden: unable to create new content in namespace a because it is being terminated"


class Cluster(MemoryCluster):
    refusal = ""
    """Why writes in namespace a are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def call(self, method: str, path: str, body: Any = None, query: Any = None, *rest: Any) -> dict[str, Any]:
        if method != "GET" and self.refusal and "/namespaces/a/" in path:
            raise ForbiddenError(self.refusal)
        self.asked += [text for name, text in query or [] if name == "labelSelector"]
        return super().call(method, path, body, query, *rest)

    def secrets(self, namespace: str) -> set[str]:
        paths = [path.split("/namespaces/")[1].split("/") for path in self.objects]
        return {name for place, plural, name in paths if (place, plural) == (namespace, "secrets")}

    def conditions(self) -> dict[str, Any]:
        found = self.objects[f"{QUEUES}/quickstart"]["status"]["conditions"]
        return {entry["type"]: (entry["reason"], entry["message"]) for entry in found}


@pytest.fixture
def cluster() -> Cluster:
    """Pods of the namespaces a and b use the queue."""
    made = Cluster()
    made.put(f"{QUEUES}/quickstart", document(OPERATOR))
    for namespace in ("a", "b"):
        made.put(f"/api/v1/namespaces/{namespace}/pods/trainer", pod())
    return made


def foreign_secret() -> str:
    return queue_from(document(OPERATOR)).client_secret("a")


def test_a_secret_of_somebody_else_in_one_namespace_keeps_no_other_waiting(cluster: Cluster) -> None:
    cluster.put(f"/api/v1/namespaces/a/secrets/{foreign_secret()}", {"kind": "Secret", "metadata": {}})
    assert not Reconciler(cluster, IMAGES, (), "test").reconcile(KEY)
    assert cluster.secrets("b") == {foreign_secret()}
    assert {"quickstart-tls-server", "quickstart-tls-client"} < cluster.secrets("rl")
    reason, words = cluster.conditions()["Degraded"]
    assert reason == "CertificateNotMade"
    assert f"a/{foreign_secret()} exists and belongs to something else" in words


def test_a_namespace_that_refuses_a_secret_is_named_and_keeps_no_other_waiting(cluster: Cluster) -> None:
    cluster.refusal = "secrets is forbidden: exceeded quota: few"
    assert not Reconciler(cluster, IMAGES, (), "test").reconcile(KEY)
    assert cluster.secrets("b") == {foreign_secret()}
    reason, words = cluster.conditions()["Degraded"]
    assert reason == "QuotaExceeded"
    assert f"Secret a/{foreign_secret()}" in words


@pytest.mark.parametrize("spec", [OPERATOR, ISSUER])
def test_a_namespace_that_is_being_deleted_is_no_problem_of_the_queue(cluster: Cluster, spec: str) -> None:
    cluster.put(f"{QUEUES}/quickstart", document(spec))
    cluster.refusal = ENDING
    assert Reconciler(cluster, IMAGES, (), "test").reconcile(KEY)
    assert cluster.conditions()["Degraded"][0] == "AsExpected"


def test_a_queue_that_is_gone_leaves_nothing_and_asks_for_what_is_its_own_alone(cluster: Cluster) -> None:
    other = {"annotations": {"transferqueue.io/queue": "elsewhere/quickstart"}}
    reconciler = Reconciler(cluster, IMAGES, (), "test")
    assert reconciler.reconcile(KEY)
    (path,) = [path for path in cluster.objects if path.startswith("/api/v1/namespaces/b/secrets/")]
    found = cluster.objects[path]
    cluster.put("/api/v1/namespaces/b/secrets/other", {**found, "metadata": {**found["metadata"], **other}})
    cluster.drop(f"{QUEUES}/quickstart")
    cluster.asked.clear()
    assert reconciler.reconcile(KEY)
    assert cluster.secrets("a") == set()
    assert cluster.secrets("b") == {"other"}
    assert cluster.asked
    assert all("transferqueue.io/queue=quickstart" in selector for selector in cluster.asked)
