"""Calls of the operator against a server that answers as an apiserver does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from kubernetes import client

from tests.unit.operator.queues import document
from tq_operator.api.crd import custom_resource_definitions
from tq_operator.kubectl.access import Access
from tq_operator.kubectl.checks import Surroundings, examine
from tq_operator.runtime.cluster import CHILD_KINDS, Cluster, ClusterError

API = "/apis/resource.k8s.io/v1"
CLASS = f"{API}/deviceclasses/rdma.example.com"
SLICES = f"{API}/resourceslices"
OLD: dict[str, Any] = {
    f"{prefix}/namespaces/rl/{plural}": {"items": []} for prefix, plural in CHILD_KINDS.values() if prefix != API
}
"""A cluster older than Kubernetes 1.34."""


@pytest.fixture
def answers() -> dict[str, Any]:
    """Path -> object, or the status of a refusal. All else is not found."""
    return {}


@pytest.fixture
def access(answers: Mapping[str, Any]) -> Iterator[Access]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0], 404)
            status, body = (answer, {"message": f"status {answer}"}) if isinstance(answer, int) else (200, answer)
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        settings = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
        settings.no_proxy = "127.0.0.1"
        yield Access(settings, "rl")
        server.shutdown()
        thread.join()


@pytest.fixture
def cluster(access: Access) -> Iterator[Cluster]:
    with access.api() as api:
        yield Cluster(api)


def slices(*devices: int) -> dict[str, Any]:
    return {"items": [{"spec": {"devices": [{"name": str(n)} for n in range(count)]}} for count in devices]}


@pytest.mark.parametrize(
    ("given", "count", "why"),
    [
        ({}, 0, "the cluster does not serve resource.k8s.io/v1, which Kubernetes 1.34 and later have"),
        ({API: {}, SLICES: slices(1)}, 0, "DeviceClass rdma.example.com does not exist"),
        ({API: {}, CLASS: {}, SLICES: slices()}, 0, "no ResourceSlice lists a device"),
        ({API: {}, CLASS: {}, SLICES: {"items": [{"spec": {"sharedCounters": []}}]}}, 0, "no ResourceSlice"),
        ({API: {}, CLASS: {}, SLICES: slices(2, 0, 3)}, 5, ""),
        ({API: {}, CLASS: 403, SLICES: slices(1)}, None, ""),
        ({API: {}, CLASS: {}, SLICES: 403}, None, ""),
    ],
)
def test_devices_are_counted_or_it_is_said_why_there_are_none(
    cluster: Cluster, answers: dict[str, Any], given: dict[str, Any], count: int | None, why: str
) -> None:
    answers |= given
    found, words = cluster.claimable("rdma.example.com")
    assert found == count
    assert words.startswith(why)
    assert bool(words) == (count == 0)


NODES = "/api/v1/nodes"


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"items": []}, 0),
        # As the apiserver writes a thousand.
        (
            {"items": [{"status": {"allocatable": {"rdma/a": "1k"}}}, {"status": {"allocatable": {"rdma/a": "2"}}}]},
            1002,
        ),
        ({"items": [{"status": {"allocatable": {"cpu": "500m"}}}, {}]}, 0),
        (403, None),
    ],
)
def test_devices_of_an_extended_resource_are_counted_over_all_nodes(
    cluster: Cluster, answers: dict[str, Any], given: Any, count: int | None
) -> None:
    answers[NODES] = given
    assert cluster.offered("rdma/a") == count


@pytest.mark.parametrize("given", [{NODES: 500}, {API: {}, CLASS: 500}, {API: {}, CLASS: {}, SLICES: 500}])
def test_a_failure_of_the_apiserver_is_not_taken_for_a_missing_right(
    cluster: Cluster, answers: dict[str, Any], given: dict[str, Any]
) -> None:
    answers |= given
    with pytest.raises(ClusterError, match="status 500"):
        cluster.offered("rdma/a") if NODES in given else cluster.claimable("rdma.example.com")


def test_a_cluster_that_knows_no_claims_has_queues_all_the_same(cluster: Cluster, answers: dict[str, Any]) -> None:
    answers |= OLD
    assert cluster.children("rl", "quickstart") == {}
    template = {"metadata": {"name": "quickstart-rdma", "namespace": "rl"}}
    answers[f"{API}/namespaces/rl/resourceclaimtemplates"] = {"items": [template]}
    (found,) = cluster.children("rl", "quickstart").items()
    assert found == (
        ("ResourceClaimTemplate", "quickstart-rdma"),
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {**template["metadata"], "managedFields": []},
        },
    )


def test_templates_that_may_not_be_listed_are_not_taken_for_none(cluster: Cluster, answers: dict[str, Any]) -> None:
    answers |= {**OLD, f"{API}/namespaces/rl/resourceclaimtemplates": 403}
    with pytest.raises(ClusterError, match="status 403"):
        cluster.children("rl", "quickstart")


def deployment(namespace: str, watched: str) -> dict[str, Any]:
    env = [{"name": "TQ_WATCH_NAMESPACES", "value": watched}]
    return {
        "metadata": {"namespace": namespace, "name": "tq-operator"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "operator", "env": env}]}}},
        "status": {"readyReplicas": 1},
    }


@pytest.mark.parametrize(
    ("watched", "told"),
    [(("", ""), True), (("a,b", ""), True), (("a,b", "b,c"), True), (("a,b", "c"), False), (("a",), False)],
)
def test_doctor_tells_of_operators_that_work_in_the_same_namespaces(
    access: Access, answers: dict[str, Any], watched: tuple[str, ...], told: bool
) -> None:
    answers["/version"] = {"gitVersion": "v1.36.0"}
    answers["/apis/apps/v1/deployments"] = {"items": [deployment(f"ns-{n}", text) for n, text in enumerate(watched)]}
    texts = [finding.text for finding in examine(Surroundings(access)) if finding.state == "fail"]
    words = "ns-0/tq-operator and ns-1/tq-operator work in the same namespaces: each queue is kept by one of them"
    assert (words in texts) == told


@pytest.mark.parametrize(
    ("policy", "given", "state", "text", "fix"),
    [
        ("auto", {}, "warn", "the cluster does not serve resource.k8s.io/v1", "check that the DRA driver runs"),
        (
            "required",
            {API: {}},
            "fail",
            "DeviceClass rdma.example.com does not exist",
            "check that the DRA driver runs",
        ),
        ("required", {API: {}, CLASS: {}, SLICES: 403}, "warn", "may not be read", "ask for the right to read it"),
        ("required", {API: {}, CLASS: {}, SLICES: slices(2)}, "ok", "ResourceSlices list 2 devices", ""),
    ],
)
def test_doctor_looks_for_the_devices_of_a_claim(
    access: Access, answers: dict[str, Any], policy: str, given: dict[str, Any], state: str, text: str, fix: str
) -> None:
    spec = f"{{backend: {{mooncake: {{}}}}, rdma: {{policy: {policy}, claim: {{deviceClassName: rdma.example.com}}}}}}"
    answers |= {"/version": {"gitVersion": "v1.36.0"}, **given}
    answers["/apis/transferqueue.io/v1alpha1/namespaces/rl/transferqueues"] = {
        "metadata": {"resourceVersion": "1"},
        "items": [document(spec)],
    }
    established = {"status": {"conditions": [{"type": "Established", "status": "True"}]}}
    for definition in custom_resource_definitions().values():
        name = definition["metadata"]["name"]
        answers[f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"] = {**definition, **established}
    (found,) = (finding for finding in examine(Surroundings(access)) if finding.check == "rdma")
    assert found.state == state
    assert text in found.text
    assert found.fix.startswith(fix)
