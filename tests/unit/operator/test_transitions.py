"""Every change of a queue comes to the same end, whichever write to the apiserver fails on the way.

The reconciler is the real one; the apiserver is in memory, and makes pods ready at once. What a real one adds is in
tests/integration/operator/test_write_failures.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES, document
from tests.unit.operator.test_watched import KEY, PODS, QUEUES, pod
from tq_operator.runtime import reconciler as module
from tq_operator.runtime.cluster import ClusterError, ForbiddenError, ImmutableError
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.usage import Usage

SIMPLE = "{backend: {simple: {}}, storage: {replicas: 2}, security: {tls: {mode: 'off'}}}"
TLS = SIMPLE.replace("'off'", "operator")
MASTER = "{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}}"
MASTERS = MASTER.replace("256Mi", "256Mi, highAvailability: {etcd: ETCD}")
CLAIM = "{backend: {mooncake: {globalSegmentSize: 256Mi}}, rdma: {policy: required, claim: {deviceClassName: CLASS}}}"
SPILL = "{backend: {simple: {ssdOffload: {capacity: 1Gi}}}, storage: {replicas: 2}}"

TRANSITIONS = {
    "storage scaled": (SIMPLE, SIMPLE.replace("2", "3")),
    "storage scaled in": (SIMPLE, SIMPLE.replace("2", "1")),
    "pods restarted": (SIMPLE, SIMPLE.replace("replicas: 2", "replicas: 2, nodeSelector: {disk: fast}")),
    "TLS turned on": (SIMPLE, TLS),
    "TLS turned off": (TLS, SIMPLE),
    "TLS of an issuer": (TLS, SIMPLE.replace("mode: 'off'", "mode: issuer, issuerRef: {name: ca}")),
    "a policy for the network": (SIMPLE, SIMPLE.replace("tls:", "networkPolicy: true, tls:")),
    "no budget for evictions": (SIMPLE, SIMPLE.replace("storage", "disruptionBudget: false, storage")),
    "a journal on a volume": (SIMPLE, SIMPLE.replace("storage", "controller: {durability: node}, storage")),
    "a journal given up": (SIMPLE.replace("storage", "controller: {durability: node}, storage"), SIMPLE),
    "blocks on a disk": (SIMPLE, SPILL),
    "blocks on a volume": (SPILL, SPILL.replace("1Gi", "1Gi, storageClassName: ssd")),
    "several masters": (MASTER, MASTERS.replace("ETCD", "{development: {}}")),
    "another etcd": (MASTERS.replace("ETCD", "{development: {}}"), MASTERS.replace("ETCD", "{endpoints: ['e:2379']}")),
    "one master again": (MASTERS.replace("ETCD", "{endpoints: ['e:2379']}"), MASTER),
    "RDMA by claims": (MASTER, CLAIM.replace("CLASS", "a.example")),
    "another device class": (CLAIM.replace("CLASS", "a.example"), CLAIM.replace("CLASS", "b.example")),
    "no RDMA": (CLAIM.replace("CLASS", "a.example"), MASTER),
    "another backend": (SIMPLE, MASTER),
    "a backend of the job": (MASTER, "{backend: {ray: {}}}"),
}


LASTING = {"DevicesOffered", "FellBackToTcp"}
"""Events of a state that no failing write changes."""


class Cluster(MemoryCluster):
    """Chosen writes fail: before they are done, or, with ``late``, afterwards. Pods are ready at once.

    Not those of events, which are not sent again: the condition says the same.
    """

    def __init__(self, fails: Callable[[int], bool], late: bool) -> None:
        super().__init__()
        self.writes = 0
        self.told: set[str] = set()
        """Reasons of the events that were sent, whether or not that was answered."""
        self._fails, self._late = fails, late

    def claimable(self, device_class: str) -> tuple[int | None, str]:
        return 4, ""

    def call(self, method: str, path: str, body: Any = None, *rest: Any, **more: Any) -> dict[str, Any]:
        if method == "GET":
            return super().call(method, path, body, *rest, **more)
        self.writes += 1
        failing = self._fails(self.writes) and method != "POST"
        if failing and not self._late:
            raise ClusterError("409: as the test wants it")
        answer = self._done(method, path, body, *rest, **more)
        if failing:
            raise ClusterError("500: as the test wants it")
        return answer

    def _done(self, method: str, path: str, body: Any, *rest: Any, **more: Any) -> dict[str, Any]:
        if method == "POST":
            self.told.add(body["reason"])
        old = self.objects.get(path)
        if (
            method == "PATCH"
            and old is not None
            and "volumeClaimTemplates" in {**old.get("spec", {}), **body.get("spec", {})}
        ):
            volumes = [item["spec"].get("volumeClaimTemplates") for item in (old, body)]
            assert volumes[0] == volumes[1], "the apiserver refuses another volume of a StatefulSet"
        return super().call(method, path, body, *rest, **more)

    def start_pods(self) -> None:
        for path, item in list(self.objects.items()):
            if "replicas" in item.get("spec", {}):
                count = item["spec"]["replicas"]
                status = {"observedGeneration": 1, "readyReplicas": count, "updatedReplicas": count}
                self.put(path, {**item, "status": status})


class Life:
    def __init__(self, before: str, fails: Callable[[int], bool], late: bool) -> None:
        self.cluster = Cluster(lambda number: self.watching and fails(number - self.began), late)
        self.watching, self.began = False, 0
        self.reconciler = Reconciler(self.cluster, IMAGES, (), "test")
        self.cluster.put(f"{PODS.replace('/rl/', '/jobs/')}/trainer", pod())
        self.put(before)
        self.settle()
        self.watching, self.began = True, self.cluster.writes

    def put(self, spec: str) -> None:
        old = self.cluster.objects.get(f"{QUEUES}/quickstart", {})
        generation = old.get("metadata", {}).get("generation", 0) + 1
        new = document(spec.replace("{backend", "{access: {namespaces: [jobs]}, backend", 1), generation=generation)
        self.cluster.put(f"{QUEUES}/quickstart", {**new, "status": old.get("status", {})})

    def settle(self) -> None:
        for _ in range(60):
            before = self.cluster.writes
            try:
                settled = self.reconciler.reconcile(KEY)
            except ClusterError:  # the worker tries again
                settled = False
            if settled and self.cluster.writes == before:
                return
            self.cluster.start_pods()
        raise AssertionError("it never comes to rest")

    def end(self) -> dict[str, str]:
        """What there is then."""
        return {path: _lasting(item) for path, item in self.cluster.objects.items()}


def _lasting(item: dict[str, Any]) -> str:
    """Less the keys of certificates, which are others each time, and what counts writes."""
    kept = copy.deepcopy({name: value for name, value in item.items() if name not in ("data", "metadata")})
    if item.get("kind") != "Secret":
        kept["data"] = item.get("data")
    for condition in kept.get("status", {}).get("conditions", []):
        del condition["lastTransitionTime"]
    return json.dumps(kept, sort_keys=True)


def change(name: str, fails: Callable[[int], bool] = lambda _: False, late: bool = False) -> Life:
    before, after = TRANSITIONS[name]
    life = Life(before, fails, late)
    life.put(after)
    life.settle()
    return life


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_change_comes_to_the_same_end_whichever_write_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "storage_usage", lambda url: Usage(0))
    undisturbed = change(name)
    number, end = undisturbed.cluster.writes - undisturbed.began, undisturbed.end()
    assert number > 1
    for failing in range(1, number + 1):
        for late in (False, True):
            life = change(name, lambda n, failing=failing: n == failing, late)  # type: ignore[misc]
            assert life.end() == end, (failing, late)
            assert undisturbed.cluster.told & LASTING <= life.cluster.told, (failing, late)
    for every in (2, 3, 5):
        life = change(name, lambda n, every=every: n % every == 0, late=every == 3)  # type: ignore[misc]
        assert life.end() == end, every


@pytest.mark.parametrize(
    ("error", "refusal", "made_again"),
    [
        (ClusterError('ports[1].name: Duplicate value: "a"'), None, False),
        (ImmutableError("field is immutable"), None, True),
        (ImmutableError("field is immutable"), ClusterError("Invalid value"), False),
        (ImmutableError("field is immutable"), ForbiddenError("exceeded quota: few"), True),
    ],
)
def test_a_child_is_deleted_only_if_it_can_be_made_again(
    error: ClusterError, refusal: ClusterError | None, made_again: bool
) -> None:
    path = "/api/v1/namespaces/rl/services/quickstart-controller"

    class Refusing(MemoryCluster):
        def call(self, method: str, at: str, body: Any = None, query: Any = None, *rest: Any) -> dict[str, Any]:
            if at == path and method == "PATCH" and at in self.objects:
                raise error
            if method == "POST" and at.endswith("/services"):
                assert ("dryRun", "All") in query
                if refusal:
                    raise refusal
            return super().call(method, at, body, query, *rest)

    cluster = Refusing()
    cluster.put(f"{QUEUES}/quickstart", document(SIMPLE))
    reconciler = Reconciler(cluster, IMAGES, (), "test")
    assert reconciler.reconcile(KEY)
    old = cluster.objects[path]
    cluster.put(path, {**old, "spec": {**old["spec"], "ports": []}})
    assert reconciler.reconcile(KEY) == made_again
    assert (cluster.objects[path]["metadata"]["uid"] != old["metadata"]["uid"]) == made_again
