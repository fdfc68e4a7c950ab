"""RDMA on real kubelets: a device plugin offers devices, and pods that get one see a recorded machine."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.device_plugin import offering
from tests.cluster.images import image_reference
from tests.cluster.product import NAMESPACE, SYSTEM, access, apply, queue
from tests.unit.fabric.trees import DATA, build, facts_of
from tq_operator.kubectl.access import condition
from tq_operator.plan.names import INJECT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE, RESOURCE = "rails", "rdma/hca"
MACHINES = {"node1": "hgx-8g-12n-ibstat", "node2": "rtx4090-8g-2n-5-3"}
ON_NODE = "/var/lib/kubelet/fabric"  # a folder of each node's own
IN_POD = "/fabric"


@pytest.fixture(scope="module")
def rails(replicated: Cluster) -> Iterator[Cluster]:
    """The cluster, each node with the tree of another machine, and a queue that insists on RDMA."""
    for node in replicated.nodes:
        root = node.folder / "kubelet" / "fabric"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        build(facts_of(MACHINES[node.name]), root)
        for file in (root / "dev" / "infiniband").iterdir():
            file.unlink()
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null, which every container may open
            file.chmod(0o666)
    mooncake = {"globalSegmentSize": "64Mi"}
    rdma = {"policy": "required", "resourceName": RESOURCE}
    apply(replicated, queue(QUEUE, backend={"mooncake": mooncake}, rdma=rdma, storage={"replicas": 1}))
    yield replicated
    replicated.kubectl("delete", "-n", NAMESPACE, f"tq/{QUEUE}", "--timeout=60s")


def told(cluster: Cluster, kind: str) -> tuple[str, str]:
    """Status and reason of a condition of the queue."""
    found = condition(access(cluster).queue(QUEUE), kind)
    return found.get("status", ""), found.get("reason", "")


def expected(machine: str) -> dict[str, list[str]]:
    """HCAs of each GPU, as the recorded choice has them: `GPU0 mlx5_0 PIX: why`."""
    lines = (DATA / "expected" / f"{machine}.txt").read_text().splitlines()
    rows = [line.partition(":")[0].split() for line in lines if line.startswith("GPU")]
    return {row[0]: row[1].split(",") for row in rows}


def looking(node: str) -> dict[str, Any]:
    """A pod that asks for the queue and says what it would use."""
    container = {
        "name": "main",
        "image": image_reference("trainer"),
        "imagePullPolicy": "Never",
        "command": ["python", "-m", "transfer_queue.fabric", "--root", IN_POD, "--json"],
    }
    metadata = {"name": f"on-{node}", "namespace": NAMESPACE, "labels": {INJECT_LABEL: QUEUE}}
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_pods_wait_for_rdma_and_then_choose_the_devices_nearest_to_their_gpus(rails: Cluster) -> None:
    wait_until(lambda: told(rails, "RdmaAvailable") == ("False", "RdmaUnavailable"), "the queue says what it lacks", 30)
    apply(rails, *(looking(node.name) for node in rails.nodes))

    def phases() -> set[str]:
        pods = access(rails).cluster.pods([NAMESPACE], QUEUE)
        return {pod["status"]["phase"] for pod in pods if pod["metadata"]["name"].startswith(("on-", QUEUE + "-stor"))}

    wait_until(lambda: told(rails, "Degraded") == ("True", "RdmaUnavailable"), "the queue is degraded", 30)
    assert phases() == {"Pending"}
    with ExitStack() as stack:
        for node in rails.nodes:
            folder = Path(node.folder / "kubelet" / "device-plugins")
            names = [f"hca{number}" for number in range(4)]
            stack.enter_context(offering(folder, RESOURCE, names, {IN_POD: ON_NODE}))
        for node in rails.nodes:
            ended = "--for=jsonpath={.status.phase}=Succeeded"
            rails.kubectl("wait", "-n", NAMESPACE, f"pod/on-{node.name}", ended, "--timeout=90s")
            found = json.loads(rails.kubectl("logs", "-n", NAMESPACE, f"on-{node.name}"))
            assert {gpu["name"]: gpu["hcas"] for gpu in found["gpus"]} == expected(MACHINES[node.name])
        wait_until(lambda: told(rails, "RdmaAvailable") == ("True", "DevicesOffered"), "the queue sees the devices", 60)


def test_the_nodes_report_their_devices(rails: Cluster) -> None:
    daemons = ("daemonset", "transferqueue-operator-node", "-n", SYSTEM)

    def look_into(volumes: list[dict[str, Any]]) -> None:
        patch = json.dumps({"spec": {"template": {"spec": {"volumes": volumes}}}})
        rails.kubectl("patch", *daemons, "-p", patch)

    def reports() -> dict[str, str]:
        rows = rails.kubectl("get", "tqnodes", "--no-headers").splitlines()
        return {row.split()[0]: row.split()[1] for row in rows}

    before = json.loads(rails.kubectl("get", *daemons, "-o", "json"))["spec"]["template"]["spec"]["volumes"]
    look_into([{"name": name, "hostPath": {"path": f"{ON_NODE}/{name}"}} for name in ("sys", "dev", "proc")])
    try:
        wait_until(lambda: reports() == {"node1": "8/12", "node2": "2/2"}, "both nodes have their reports", 60)
        assert "mlx5_1: port 1 is DOWN, not ACTIVE" in rails.kubectl("get", "tqnode", "node1", "-o", "wide")
    finally:
        look_into(before)  # helm refuses an upgrade over values that another manager set
