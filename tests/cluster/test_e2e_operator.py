"""Two operators on the real cluster: one ends, is killed, or both are away, and nobody notices."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import pytest
import yaml
from cryptography import x509
from kubernetes.dynamic.exceptions import NotFoundError

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.product import (
    CHART,
    NAMESPACE,
    OPERATOR,
    SYSTEM,
    access,
    apply,
    hanging_kubelet,
    kill,
    node_of,
    queue,
    wait_ready,
)
from tq_operator.kubectl.access import condition, is_ready
from tq_operator.plan.names import INJECT_LABEL, INJECTED_ANNOTATION, selector
from tq_operator.plan.step import PAUSE
from tq_operator.runtime.certificates import secret_data
from tq_operator.runtime.cluster import Cluster as RuntimeCluster
from tq_operator.runtime.cluster import ClusterError as RefusalError
from transfer_queue.launch.certificates import KeyPair, sign

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE = "kept"
TAKEOVER_S = 15.0
SECRET = f"/api/v1/namespaces/{SYSTEM}/secrets/{OPERATOR}-webhook-tls"
PODS = f"/api/v1/namespaces/{SYSTEM}/pods"
CHOSEN = "app.kubernetes.io/name=transferqueue-operator"


@pytest.fixture(scope="module")
def kept(replicated: Cluster) -> Iterator[Cluster]:
    """The cluster with two operators and a queue of one small storage unit."""
    apply(
        replicated,
        queue(QUEUE, backend={"simple": {}}, storage={"replicas": 1, "capacity": "64Mi"}, disruptionBudget=False),
    )
    wait_ready(replicated, QUEUE)
    yield replicated
    replicated.kubectl("delete", "-n", NAMESPACE, f"tq/{QUEUE}", "--timeout=60s")


@dataclass
class Made:
    """Pods that were asked for; what became of those that were not given their queue, and when."""

    count: int = 0
    longest_s: float = 0.0
    refused: list[tuple[float, str]] = field(default_factory=list)


@contextmanager
def pods_being_made(cluster: Cluster) -> Iterator[Made]:
    """Pods that ask for the queue, one after the other: a dry run passes admission as any other."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "asks-", "labels": {INJECT_LABEL: QUEUE}},
        "spec": {"containers": [{"name": "main", "image": "any"}]},
    }
    made, over, api = Made(), threading.Event(), access(cluster).cluster

    def work() -> None:
        while not over.wait(0.02):
            began = time.monotonic()
            try:
                answer = api.call("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod, [("dryRun", "All")])
                if INJECTED_ANNOTATION not in answer["metadata"].get("annotations", {}):
                    made.refused.append((began, "made without its queue"))
            except RefusalError as error:
                made.refused.append((began, str(error)))
            made.count += 1
            made.longest_s = max(made.longest_s, time.monotonic() - began)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()


def leader(cluster: Cluster) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{OPERATOR}"
    return str(access(cluster).cluster.call("GET", path)["spec"]["holderIdentity"])


def operators(cluster: Cluster) -> list[str]:
    """The ready ones."""
    found = access(cluster).cluster.call("GET", PODS, query=[("labelSelector", CHOSEN)])["items"]
    return [pod["metadata"]["name"] for pod in found if is_ready(pod)]


def wait_for_two(cluster: Cluster) -> None:
    wait_until(lambda: len(operators(cluster)) == 2, "two operators are ready", 60)
    wait_until(lambda: leader(cluster) in operators(cluster), "one of them leads", 30)


def taken_over(cluster: Cluster, old: str, began: float) -> float:
    """Seconds from ``began`` until another one leads."""
    wait_until(lambda: leader(cluster) not in ("", old), "another operator leads", TAKEOVER_S)
    return time.monotonic() - began


def served(cluster: Cluster) -> set[float]:
    """When the certificates end that the operators serve."""
    name = "tq_operator_certificate_end_timestamp_seconds "
    found = set()
    for pod in operators(cluster):
        page = access(cluster).cluster.read(f"{PODS}/{pod}:8081/proxy/metrics")
        found.add(float(next(line for line in page.splitlines() if line.startswith(name)).removeprefix(name)))
    return found


def ends(certificate: bytes) -> float:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def due(secret: dict[str, Any]) -> KeyPair:
    """A certificate like that of the Secret, of whose life a fifth is left."""
    data = secret_data(secret)
    old = x509.load_pem_x509_certificate(data["tls.crt"])
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    life, uses = old.not_valid_after_utc - old.not_valid_before_utc, [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    authority = KeyPair(data["ca.crt"], data["ca.key"])
    return sign(authority, old.subject, names, uses, datetime.now(timezone.utc) - 0.8 * life, life)


def test_no_pod_is_refused_while_the_leader_ends_and_the_certificate_and_its_authority_are_replaced(
    kept: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_two(kept)
    api, old = access(kept).cluster, due(access(kept).cluster.call("GET", SECRET))
    data = {"tls.crt": old.certificate, "tls.key": old.key}
    patch = {"data": {name: base64.b64encode(text).decode() for name, text in data.items()}}

    def served_by_all() -> dict[str, bytes]:
        content = secret_data(found) if (found := kept_secret(api)) else {}
        fresh = content and content["tls.crt"] != old.certificate
        both = fresh and len(operators(kept)) == 2 and served(kept) == {ends(content["tls.crt"])}
        return content if both else {}

    with pods_being_made(kept) as made:
        api.call("PATCH", SECRET, patch, content_type="application/merge-patch+json")
        first, began = leader(kept), time.monotonic()
        kept.kubectl("delete", "pod", first, "-n", SYSTEM, "--wait=false")
        after = taken_over(kept, first, began)
        wait_until(lambda: bool(served_by_all()), "a new certificate is made and both serve it", 60)
        authority = secret_data(api.call("GET", SECRET))["ca.crt"]
        kept.kubectl("delete", "secret", f"{OPERATOR}-webhook-tls", "-n", SYSTEM)

        def replaced() -> bool:
            content = served_by_all()
            return bool(content) and content["ca.crt"] != authority

        wait_until(replaced, "both serve a certificate of a new authority", 60)
    with capsys.disabled():
        print(f" {made.count} pods, the slowest {made.longest_s:.2f} s; another leads after {after:.1f} s ", end="")
    assert made.refused == []
    assert made.count > 50


def kept_secret(api: RuntimeCluster) -> dict[str, Any] | None:
    try:
        return api.call("GET", SECRET)
    except NotFoundError:  # between an old and a new one
        return None


def test_another_operator_leads_within_15_seconds_when_the_leader_is_killed(
    kept: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_two(kept)
    first = leader(kept)
    with pods_being_made(kept) as made, hanging_kubelet(kept, node_of(kept, SYSTEM, first)):
        began = kill(kept, SYSTEM, first)
        kept.kubectl("delete", "pod", first, "-n", SYSTEM, "--force", "--grace-period=0")
        gone = time.monotonic()
        after = taken_over(kept, first, began)
    with capsys.disabled():
        print(f" {made.count} pods, {len(made.refused)} refused; another leads after {after:.1f} s ", end="")
    # The API server calls the dead one until it is no endpoint any more.
    assert [words for when, words in made.refused if when > gone + 1] == []
    assert made.count > 50


def test_operators_that_were_away_take_up_what_there_is_and_leave_a_paused_queue_alone(kept: Cluster) -> None:
    def workload() -> dict[str, Any]:
        return access(kept).cluster.call("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/{QUEUE}-storage")

    def pods() -> dict[str, str]:
        found = access(kept).pods(QUEUE)
        return {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in found if is_ready(pod)}

    def state() -> dict[str, Any]:
        return access(kept).queue(QUEUE)

    def held() -> bool:
        now = state()
        seen = now["status"]["observedGeneration"] == now["metadata"]["generation"]
        return bool(seen and condition(now, "Progressing")["reason"] == "Held")

    service = ("service", f"{QUEUE}-storage", "-n", NAMESPACE)
    wait_for_two(kept)
    before, made = pods(), workload()["metadata"]["uid"]
    assert len(before) == 2
    kept.kubectl("annotate", "-n", NAMESPACE, f"tq/{QUEUE}", f"{PAUSE}=true")
    kept.kubectl("scale", "deployment", OPERATOR, "-n", SYSTEM, "--replicas=0")
    wait_until(lambda: not operators(kept), "no operator runs", 60)
    kept.kubectl("delete", *service)
    kept.kubectl("scale", "-n", NAMESPACE, f"tq/{QUEUE}", "--replicas=2")
    kept.kubectl("scale", "deployment", OPERATOR, "-n", SYSTEM, "--replicas=2")
    wait_until(held, "the paused queue was looked at", 60)
    assert "Paused by the annotation" in condition(state(), "Progressing")["message"]
    assert not kept.kubectl("get", *service, "--ignore-not-found").strip()
    assert workload()["spec"]["replicas"] == 1
    kept.kubectl("annotate", "-n", NAMESPACE, f"tq/{QUEUE}", f"{PAUSE}-")
    wait_until(lambda: len(pods()) == 3, "the second storage unit runs", 60)
    assert before.items() <= pods().items(), "pods were replaced"
    assert workload()["metadata"]["uid"] == made
    kept.kubectl("get", *service)
    restarts = kept.kubectl(
        *("get", "pods", "-n", NAMESPACE, "-o", "jsonpath={.items[*].status.containerStatuses[*].restartCount}")
    )
    assert set(restarts.split()) == {"0"}


def test_a_missing_storage_unit_raises_the_alert_and_is_on_the_page(replicated: Cluster) -> None:
    name = "short"
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector(name, "storage")}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    storage = {"replicas": 3, "capacity": "64Mi", "affinity": affinity}  # on two nodes
    (rule,) = (
        rule
        for group in yaml.safe_load((CHART / "files" / "alerts" / "transferqueue.yaml").read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] == "TransferQueueUnitsMissing"
    )
    left, operator, right = rule["expr"].split()
    assert operator == "<"

    def page(path: str) -> str:
        (pod,) = (pod for pod in access(replicated).pods(name) if "controller" in pod["metadata"]["name"])
        port = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:9060/proxy"
        return access(replicated).cluster.read(port + path)

    def units() -> tuple[float, float]:
        found = dict(line.split() for line in page("/metrics").splitlines() if line.startswith((left, right)))
        return float(found[left]), float(found[right])

    def says(summary: str) -> bool:
        return bool(access(replicated).queue(name).get("status", {}).get("storage", {}).get("summary") == summary)

    # The page is served where nobody is kept out.
    open_to_all = {"tls": {"mode": "off"}}
    apply(replicated, queue(name, backend={"simple": {}}, storage=storage, security=open_to_all))
    try:
        wait_until(lambda: says("2/3"), "two units are ready", 120)
        wait_until(lambda: units() == (2, 3), "the alert's expression is true", 60)
        drawn = json.loads(page("/api/dataflow"))
        assert (sum(unit["connected"] for unit in drawn["units"]), drawn["expected_units"]) == (2, 3)
        ready = condition(access(replicated).queue(name), "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
        replicated.kubectl("scale", "-n", NAMESPACE, f"tq/{name}", "--replicas=2")
        wait_until(lambda: units() == (2, 2), "two are wanted, and the alert is over", 150)
    finally:
        replicated.kubectl("delete", "-n", NAMESPACE, f"tq/{name}", "--timeout=60s")
