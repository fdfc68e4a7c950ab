"""RDMA devices and GPUs by resource claims on real kubelets, from drivers that publish devices and prepare claims."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.dra_driver import Device, Driver, device_class, driving
from tests.cluster.node import SANDBOX_IMAGE
from tests.cluster.product import NAMESPACE, access, apply, queue
from tq_operator.kubectl.access import condition
from tq_operator.plan.names import INJECT_LABEL, QUEUE_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE = "claims"
NICS, GPUS = "nic.example.com", "gpu.example.com"  # each the name of a driver and of its DeviceClass
# No two that belong together have the same place in their lists. Storage gets the first card: it has no GPU beside it.
DEVICES = {
    NICS: [
        Device("eth0", "ethernet", "pci0000:17"),  # not of the class
        Device("spare", "rdma", "pci0000:00"),
        Device("nic0", "rdma", "pci0000:97"),
        Device("nic1", "rdma", "pci0000:17"),
    ],
    GPUS: [Device("gpu0", "gpu", "pci0000:17"), Device("gpu1", "gpu", "pci0000:97")],
}
PAIRS = [{"gpu": "gpu0", "rdma": "nic1"}, {"gpu": "gpu1", "rdma": "nic0"}]

Drivers = dict[tuple[str, str], Driver]
"""By node and name."""


@pytest.fixture(scope="module")
def waiting(replicated: Cluster) -> Iterator[tuple[Cluster, ExitStack]]:
    """A queue that insists on claims, two pods for each node that ask for it, and what ends after them."""
    claim = {"deviceClassName": NICS, "gpuDeviceClassName": GPUS}
    mooncake = {"globalSegmentSize": "64Mi"}
    rdma = {"policy": "required", "claim": claim}
    names = [f"{node.name}-{number}" for node in replicated.nodes for number in range(2)]
    with ExitStack() as drivers:
        try:
            apply(replicated, queue(QUEUE, backend={"mooncake": mooncake}, rdma=rdma, storage={"replicas": 1}))
            wait_until(lambda: told(replicated)[0] != "", "the queue is taken up", 30)
            apply(replicated, *(asking(name) for name in names))
            yield replicated, drivers
        finally:
            place = ("-n", NAMESPACE, "--timeout=60s")
            replicated.kubectl("delete", "pods", "-l", f"{INJECT_LABEL}={QUEUE}", *place)
            replicated.kubectl("delete", f"tq/{QUEUE}", *place)
            replicated.kubectl("wait", "pods", "-l", f"{QUEUE_LABEL}={QUEUE}", "--for=delete", *place)
    kinds = "deviceclasses,resourceslices,resourceclaims,resourceclaimtemplates"
    wait_until(lambda: not replicated.kubectl("get", kinds, "-A", "-o", "name"), f"no {kinds} are left", 30)


@pytest.fixture(scope="module")
def driven(waiting: tuple[Cluster, ExitStack]) -> tuple[Cluster, Drivers]:
    """The cluster, with both drivers on each node since the pods have been waiting."""
    cluster, stack = waiting
    found: Drivers = {}
    for node in cluster.nodes:
        for name, devices in DEVICES.items():
            found[node.name, name] = stack.enter_context(driving(cluster, node, name, devices))
    stack.callback(cluster.kubectl, "delete", "deviceclass", NICS, GPUS)
    apply(cluster, device_class(NICS, NICS, "rdma"), device_class(GPUS, GPUS, "gpu"))
    return cluster, found


def asking(name: str) -> dict[str, Any]:
    """A pod that asks for the queue on the node of its name, NODE-NUMBER, and stays."""
    container = {"name": "main", "image": SANDBOX_IMAGE, "imagePullPolicy": "Never"}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {INJECT_LABEL: QUEUE}}
    spec = {"nodeSelector": {"kubernetes.io/hostname": name.partition("-")[0]}, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def told(cluster: Cluster) -> tuple[str, str, str]:
    """Status, reason and message of the queue's condition RdmaAvailable."""
    found = condition(access(cluster).queue(QUEUE), "RdmaAvailable")
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def pods(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The pods of the queue and those that ask for it, by name."""
    return {pod["metadata"]["name"]: pod for pod in access(cluster).cluster.pods([NAMESPACE], QUEUE)}


def allocated(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """Results of the claim of each pod that has devices."""
    claims = json.loads(cluster.kubectl("get", "resourceclaims", "-n", NAMESPACE, "-o", "json"))["items"]
    return {
        claim["metadata"]["ownerReferences"][0]["name"]: claim["status"]["allocation"]["devices"]["results"]
        for claim in claims
        if claim.get("status", {}).get("allocation")
    }


def given(cluster: Cluster, pod: str) -> dict[str, str]:
    """The device of a pod for each request. All are of the pod's node, and each is of the right driver."""
    results = allocated(cluster)[pod]
    drivers = {"gpu": GPUS, "rdma": NICS}
    assert all(result["driver"] == drivers[result["request"]] for result in results)
    assert {result["pool"] for result in results} == {pods(cluster)[pod]["spec"]["nodeName"]}
    return {result["request"]: result["device"] for result in results}


def in_use(driver: Driver) -> set[str]:
    """Devices that a node's kubelet has had prepared."""
    return {device for claim in list(driver.prepared.values()) for device in claim}


def wait_running(cluster: Cluster, *names: str) -> None:
    """Wait until pods run, which they do when the kubelet has prepared their claims."""
    words = [f"pod/{name}" for name in names]
    cluster.kubectl("wait", "-n", NAMESPACE, *words, "--for=jsonpath={.status.phase}=Running", "--timeout=60s")


def unfit(cluster: Cluster, name: str) -> bool:
    """Whether the scheduler has found no devices for a pod."""
    found = condition(pods(cluster)[name], "PodScheduled")
    return found.get("status") == "False" and "cannot allocate all claims" in found.get("message", "")


def test_pods_wait_while_there_is_no_driver(waiting: tuple[Cluster, ExitStack]) -> None:
    cluster, _ = waiting
    status, reason, message = told(cluster)
    assert (status, reason) == ("False", "RdmaUnavailable")
    assert f"DeviceClass {NICS} does not exist" in message
    degraded = "--for=jsonpath={.status.conditions[?(@.type=='Degraded')].reason}=RdmaUnavailable"
    cluster.kubectl("wait", "-n", NAMESPACE, f"tq/{QUEUE}", degraded, "--timeout=30s")
    expected = {f"{QUEUE}-storage-0", "node1-0", "node1-1", "node2-0", "node2-1"}
    wait_until(lambda: expected <= pods(cluster).keys(), "the storage pod is made", 30)
    unscheduled = "--for=condition=PodScheduled=false"
    cluster.kubectl("wait", "-n", NAMESPACE, *(f"pod/{name}" for name in expected), unscheduled, "--timeout=30s")
    assert {pods(cluster)[name]["status"]["phase"] for name in expected} == {"Pending"}


def test_pods_get_a_gpu_and_a_device_below_its_root_on_each_node(driven: tuple[Cluster, Drivers]) -> None:
    cluster, drivers = driven
    wait_until(lambda: told(cluster)[:2] == ("True", "DevicesOffered"), "the queue sees the devices", 60)
    for node in ("node1", "node2"):
        names = (f"{node}-0", f"{node}-1")
        wait_running(cluster, *names)
        pairs = [given(cluster, name) for name in names]
        assert sorted(pairs, key=lambda pair: pair["gpu"]) == PAIRS
        for request, driver in (("gpu", GPUS), ("rdma", NICS)):
            assert {pair[request] for pair in pairs} <= in_use(drivers[node, driver])
    storage = f"{QUEUE}-storage-0"
    wait_until(lambda: storage in allocated(cluster), "the storage pod has its device", 30)
    assert given(cluster, storage) == {"rdma": "spare"}


def test_a_pod_waits_until_a_gpu_and_a_device_below_its_root_are_free(driven: tuple[Cluster, Drivers]) -> None:
    cluster, drivers = driven
    wait_running(cluster, "node1-0", "node1-1")
    freed = given(cluster, "node1-0")
    assert freed in PAIRS
    apply(cluster, asking("node1-2"))
    wait_until(lambda: unfit(cluster, "node1-2"), "the third pod of the node fits nowhere", 30)
    assert "node1-2" not in allocated(cluster)
    claimed = set(drivers["node1", GPUS].prepared)
    cluster.kubectl("delete", "pod", "node1-0", "-n", NAMESPACE, "--timeout=60s")
    wait_running(cluster, "node1-2")
    assert given(cluster, "node1-2") == freed
    now = drivers["node1", GPUS].prepared
    assert len(claimed & now.keys()) == 1, "the kubelet let go of the claim of the pod that ended"
    assert in_use(drivers["node1", GPUS]) == {"gpu0", "gpu1"}
