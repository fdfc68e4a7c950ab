"""Secrets of a queue's certificates in many namespaces: what stands in the way in one is no matter of the others."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from cryptography import x509

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES, document
from tests.unit.operator.test_watched import KEY, QUEUES, pod
from tq_operator.plan.queue import queue_from
from tq_operator.runtime.certificates import Certificates, secret_data
from tq_operator.runtime.cluster import ForbiddenError
from tq_operator.runtime.reconciler import Reconciler
from transfer_queue.launch.certificates import issued_by

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


def test_a_new_ca_joins_the_old_one_before_certificates_change_and_the_old_one_leaves_after_an_hour(
    cluster: Cluster,
) -> None:
    start, minute = datetime(2026, 5, 1, tzinfo=timezone.utc), timedelta(minutes=1)
    certificates, queue = Certificates(cluster, (), lambda: None), queue_from(document(OPERATOR), "operator")
    paths = [f"/api/v1/namespaces/rl/secrets/quickstart-tls-{part}" for part in ("server", "client")]
    paths.append(f"/api/v1/namespaces/a/secrets/{foreign_secret()}")
    authority = "/api/v1/namespaces/rl/secrets/quickstart-tls-ca"

    def look(now: datetime) -> list[tuple[list[x509.Certificate], bytes]]:
        """CAs and certificate of each Secret."""
        assert certificates.look_after(queue, ["a"], now) == []
        found = [secret_data(cluster.objects[path]) for path in paths]
        return [(x509.load_pem_x509_certificates(data["ca.crt"]), data["tls.crt"]) for data in found]

    def ca() -> bytes:
        return secret_data(cluster.objects[authority])["ca.crt"]

    before, old = look(start), ca()
    cluster.drop(authority)
    now = start + minute
    joined, new = look(now), ca()
    parsed = {name: x509.load_pem_x509_certificate(text) for name, text in (("old", old), ("new", new))}
    assert [each[0] for each in joined] == 3 * [[parsed["new"], parsed["old"]]]
    assert [each[1] for each in joined] == [each[1] for each in before], "pods may not trust the new CA yet"
    assert look(now + 2 * minute) == joined

    changed = look(now + 3 * minute)
    assert [each[0] for each in changed] == [each[0] for each in joined], "the others may use the old CA yet"
    assert all(issued_by(certificate, new) for _, certificate in changed)
    assert look(now + 62 * minute) == changed
    ended = look(now + 63 * minute)
    assert [each[0] for each in ended] == 3 * [[parsed["new"]]]
    assert [each[1] for each in ended] == [each[1] for each in changed]

    # One that is to be distrusted at once.
    for path in (authority, paths[0]):
        cluster.drop(path)
    assert all(len(trusted) == 1 and issued_by(made, ca()) for trusted, made in look(now + 64 * minute))
    # And one that ends.
    last, later = ca(), start + timedelta(days=3400)
    trusted, _ = look(later)[0]
    assert [x509.load_pem_x509_certificate(each) for each in (ca(), last)] == trusted
    # Or one that is damaged.
    damaged = cluster.objects[authority]["data"]
    cluster.put(authority, {**cluster.objects[authority], "data": {**damaged, "ca.key": damaged["ca.crt"]}})
    assert all(len(trusted) == 3 and trusted[0] != trusted[1] for trusted, _ in look(later + minute))


def test_a_new_ca_waits_for_every_secret_and_for_an_hour_after_its_certificates_and_never_for_ever(
    cluster: Cluster,
) -> None:
    now, minute = datetime(2026, 5, 1, tzinfo=timezone.utc), timedelta(minutes=1)
    certificates, queue = Certificates(cluster, (), lambda: None), queue_from(document(OPERATOR), "operator")
    server, ca = (f"/api/v1/namespaces/rl/secrets/quickstart-tls-{part}" for part in ("server", "ca"))
    foreign = f"/api/v1/namespaces/a/secrets/{foreign_secret()}"

    def is_new() -> list[bool]:
        """Whether the certificates are of the new CA."""
        authority = secret_data(cluster.objects[ca])["ca.crt"]
        return [issued_by(secret_data(cluster.objects[path])["tls.crt"], authority) for path in (server, foreign)]

    def trusted() -> int:
        return len(x509.load_pem_x509_certificates(secret_data(cluster.objects[server])["ca.crt"]))

    certificates.look_after(queue, ["a"], now)
    cluster.drop(ca)
    cluster.refusal = "forbidden"
    certificates.look_after(queue, ["a"], now)
    certificates.look_after(queue, ["a"], now + 10 * minute)
    assert is_new() == [False, False], "pods of namespace a do not trust the new CA"
    cluster.refusal = ""
    certificates.look_after(queue, ["a"], now + 11 * minute)
    assert is_new() == [False, False], "the kubelet needs time"
    # An operator that was away for long.
    certificates.look_after(queue, ["a"], now + 500 * minute)
    assert (is_new(), trusted()) == ([True, True], 2)

    # Times that somebody changed count from the next look.
    for text in ("2999-01-01T00:00:00+00:00", "soon"):
        found = cluster.objects[server]
        marks = {**found["metadata"]["annotations"], "transferqueue.io/ca-issued": text}
        cluster.put(server, {**found, "metadata": {**found["metadata"], "annotations": marks}})
        certificates.look_after(queue, ["a"], now + 555 * minute)
    certificates.look_after(queue, ["a"], now + 614 * minute)
    assert trusted() == 2
    found = cluster.objects[server]
    marks = {**found["metadata"]["annotations"], "transferqueue.io/ca-issued": "2026-05-01T00:00:00"}  # no time zone
    cluster.put(server, {**found, "metadata": {**found["metadata"], "annotations": marks}})
    certificates.look_after(queue, ["a"], now + 614 * minute)
    assert trusted() == 1, "all others are older than an hour"
