"""The whole product on the real cluster: helm install, kubectl apply, injected Jobs on both nodes, nothing left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.errors import ClusterError
from tests.cluster.images import image_reference
from tests.cluster.paths import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CHART = REPOSITORY / "charts" / "transferqueue"
JOBS = Path(__file__).parent / "jobs"
SYSTEM, NAMESPACE, QUEUE = "transferqueue-system", "training", "quickstart"
WORKERS, GROUPS, GROUP_SIZE = 2, 4, 8
KINDS = "pods,deployments,statefulsets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,pvc"
CLUSTER_KINDS = "crd,clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations"


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[tuple[Cluster, float]]:
    """The operator, installed by its chart with local images, and when that began."""
    for image in ("operator", "server", "mooncake", "trainer"):
        cluster.load(image)
    before = ours(cluster)
    assert not before, f"left by an earlier run: {before}"
    began = time.monotonic()
    values = [f"images.{name}={image_reference(name)}" for name in ("operator", "server", "mooncake")]
    arguments = [word for value in [*values, "images.pullPolicy=Never"] for word in ("--set", value)]
    cluster.helm(
        "install",
        "transferqueue",
        str(CHART),
        "-n",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout=120s",
        *arguments,
    )
    try:
        yield cluster, began
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
        cluster.helm("uninstall", "transferqueue", "-n", SYSTEM, "--wait", "--timeout=120s", "--ignore-not-found")
        cluster.kubectl("delete", "crd", "-l", "app.kubernetes.io/part-of=transferqueue", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s")


def ours(cluster: Cluster) -> list[str]:
    """Names of all cluster-wide objects that belong to the product."""
    names = cluster.kubectl("get", CLUSTER_KINDS, "-o", "name").split()
    return sorted(name for name in names if "transferqueue" in name)


def job(name: str, script: str, node: str, arguments: list[str], completions: int = 1) -> dict[str, Any]:
    """A Job that runs `script` of the ConfigMap jobs on `node`; the label is all that it says of the queue."""
    container = {
        "name": "main",
        "image": image_reference("trainer"),
        "imagePullPolicy": "Never",
        "command": ["python", f"/jobs/{script}", *arguments],
        "volumeMounts": [{"name": "jobs", "mountPath": "/jobs"}],
    }
    pod = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "jobs", "configMap": {"name": "jobs"}}],
    }
    spec = {
        "completions": completions,
        "parallelism": completions,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": 300,
        "template": {"metadata": {"labels": {"transferqueue.io/inject": QUEUE}}, "spec": pod},
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    """Create or update `objects`."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def finished(cluster: Cluster, name: str) -> bool:
    """Whether Job `name` has succeeded; one that failed ends the test with its log."""
    status = json.loads(cluster.kubectl("get", "job", name, "-n", NAMESPACE, "-o", "json")).get("status", {})
    assert not status.get("failed"), cluster.kubectl("logs", "-n", NAMESPACE, f"job/{name}", "--tail=40")
    return any(entry["type"] == "Complete" and entry["status"] == "True" for entry in status.get("conditions", []))


def logs(cluster: Cluster, name: str) -> str:
    """What Job `name` has printed so far; nothing while its pod starts."""
    try:
        return cluster.kubectl("logs", "-n", NAMESPACE, f"job/{name}")
    except ClusterError:
        return ""


def test_rollout_data_reaches_a_trainer_on_the_other_node_byte_for_byte(installed: tuple[Cluster, float]) -> None:
    cluster, began = installed
    queue = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    queue["metadata"]["namespace"] = NAMESPACE
    scripts = {file.name: file.read_text() for file in JOBS.glob("*.py")}
    metadata = {"name": "jobs", "namespace": NAMESPACE}
    apply(
        cluster,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": scripts},
        queue,
    )
    cluster.kubectl("wait", "-n", NAMESPACE, f"tq/{QUEUE}", "--for=condition=Ready", "--timeout=120s")

    episodes = WORKERS * GROUPS * GROUP_SIZE
    apply(
        cluster,
        job("rollout", "rollout.py", "node1", [str(GROUPS)], completions=WORKERS),
        job("trainer", "trainer.py", "node2", [str(episodes)]),
    )
    wait_until(lambda: "first batch" in logs(cluster, "trainer"), "the trainer's first batch", 180)
    print(f"from helm install to the trainer's first batch: {time.monotonic() - began:.0f} s")
    for name in ("rollout", "trainer"):
        wait_until(lambda name=name: finished(cluster, name), f"Job {name} is complete", 180)  # type: ignore[misc]
    report = json.loads(logs(cluster, "trainer").splitlines()[-1])
    assert report["episodes"] == episodes
    assert len(report["hosts"]) == WORKERS


def test_wrong_yaml_is_refused_with_the_words_of_tq_up(installed: tuple[Cluster, float]) -> None:
    cluster, _ = installed
    wrong = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    wrong["metadata"] = {"name": "wrong", "namespace": "default"}
    wrong["spec"]["backend"]["simple"] = {}
    with pytest.raises(ClusterError, match="exactly one of simple, mooncake, yuanrong, ray"):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(wrong))


def test_delete_and_uninstall_leave_nothing(installed: tuple[Cluster, float]) -> None:
    cluster, _ = installed
    cluster.kubectl("delete", "tq", QUEUE, "-n", NAMESPACE, "--timeout=60s")
    cluster.kubectl("delete", "job", "--all", "-n", NAMESPACE, "--timeout=60s")

    def left() -> list[str]:
        names = cluster.kubectl("get", KINDS, "-n", NAMESPACE, "-o", "name").split()
        known = ("configmap/jobs", "configmap/kube-root-ca.crt", "serviceaccount/default")
        return [name for name in names if name not in known]

    wait_until(lambda: not left(), "the queue's children are gone", 120)
    cluster.helm("uninstall", "transferqueue", "-n", SYSTEM, "--wait", "--timeout=120s")
    wait_until(lambda: not ours(cluster), "nothing of the chart is left", 60)
    system = cluster.kubectl("get", KINDS, "-n", SYSTEM, "-o", "name").split()
    assert sorted(system) == ["configmap/kube-root-ca.crt", "serviceaccount/default"]
