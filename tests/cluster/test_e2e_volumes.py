"""A namespace with the Pod Security standard restricted on the real cluster, and volumes of a StorageClass in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.images import image_reference
from tests.cluster.product import access, apply, queue
from tq_operator.kubectl.access import is_ready
from tq_operator.plan.names import INJECT_LABEL, QUEUE_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAMESPACE, QUEUE, CLASS = "guarded", "durable", "by-hand"
FOLDER = f"/var/lib/kubelet/{CLASS}"
ROWS = 64
PUT = f"import transfer_queue as tq; tq.init(); [tq.kv_put(str(n), 'p', {{'x': n}}) for n in range({ROWS})]; tq.close()"
GET = (
    f"import transfer_queue as tq; tq.init(); print(list(tq.kv_batch_get([str(n) for n in range({ROWS})], 'p')['x'])); "
    "tq.close()"
)


def volume(name: str, node: str) -> dict[str, Any]:
    """A folder of a node, made by hand as an administrator does it for local disks."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    spec = {
        "capacity": {"storage": "256Mi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": CLASS,
        "local": {"path": f"{FOLDER}/{name}"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def guarded(installed: Cluster) -> Iterator[Cluster]:
    """The cluster with the namespace, and a queue in it whose volumes are of the class."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    names = [f"{CLASS}-{number}" for number in range(2)]
    for name in names:
        installed.nodes[0].run(["mkdir", "-p", f"{FOLDER}/{name}"])
    made = queue(
        QUEUE,
        backend={"simple": {}},
        controller={"durability": "node", "journal": {"size": "64Mi", "storageClassName": CLASS}},
        storage={"replicas": 1, "capacity": "64Mi"},
        disruptionBudget=False,
    )
    made["metadata"]["namespace"] = NAMESPACE
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    try:
        volumes = [volume(name, installed.nodes[0].name) for name in names]
        apply(installed, namespace, storage_class, *volumes, made)
        installed.kubectl("wait", "-n", NAMESPACE, f"tq/{QUEUE}", "--for=condition=Ready", "--timeout=120s")
        yield installed
    finally:
        installed.kubectl("delete", "tq,pod", "--all", "-n", NAMESPACE, "--timeout=60s")
        installed.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
        installed.kubectl("delete", "--ignore-not-found", f"storageclass/{CLASS}", *(f"pv/{name}" for name in names))
        installed.nodes[0].run(["rm", "-rf", FOLDER])


def run(cluster: Cluster, name: str, code: str) -> str:
    """What a pod of the namespace prints that uses the queue and has nothing that the standard forbids."""
    container = {
        "name": "main",
        "image": image_reference("trainer"),
        "imagePullPolicy": "Never",
        "command": ["python", "-c", code],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "securityContext": user, "containers": [container]}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {INJECT_LABEL: QUEUE}}
    apply(cluster, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ended = ("wait", "-n", NAMESPACE, f"pod/{name}", "--for=jsonpath={.status.containerStatuses[0].state.terminated}")
    cluster.kubectl(*ended, "--timeout=120s")
    said = cluster.kubectl("logs", "-n", NAMESPACE, name)
    code_path = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"  # the phase follows later
    assert cluster.kubectl("get", "pod", name, "-n", NAMESPACE, "-o", code_path) == "0", said
    return said


def test_rows_on_volumes_of_a_class_outlive_all_pods_of_the_queue_in_a_restricted_namespace(guarded: Cluster) -> None:
    def pods() -> set[str]:
        found = access(guarded).cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", query=chosen)["items"]
        return {pod["metadata"]["uid"] for pod in found if is_ready(pod)}

    chosen = [("labelSelector", label := f"{QUEUE_LABEL}={QUEUE}")]
    ours = ("-n", NAMESPACE, "-l", label)
    run(guarded, "put", PUT)
    before = pods()
    assert len(before) == 2
    guarded.kubectl("delete", "pods", *ours, "--force", "--grace-period=0")  # as when their node is lost
    wait_until(lambda: len(pods() - before) == 2, "new pods of the queue are ready", 120)
    assert run(guarded, "get", GET).splitlines()[-1] == json.dumps(list(range(ROWS)))
    claims = json.loads(guarded.kubectl("get", "pvc", *ours, "-o", "json"))["items"]
    assert {claim["spec"]["storageClassName"] for claim in claims} == {CLASS}
