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


def job(
    name: str, script: str, node: str, arguments: list[str], completions: int = 1, queue: str = QUEUE
) -> dict[str, Any]:
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
        "template": {"metadata": {"labels": {"transferqueue.io/inject": queue}}, "spec": pod},
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


def test_rollout_data_reaches_a_trainer_on_the_other_node_byte_for_byte(
    installed: tuple[Cluster, float], capsys: pytest.CaptureFixture[str]
) -> None:
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
    with capsys.disabled():
        print(f" from helm install to the trainer's first batch: {time.monotonic() - began:.0f} s ", end="")
    for name in ("rollout", "trainer"):
        wait_until(lambda name=name: finished(cluster, name), f"Job {name} is complete", 180)  # type: ignore[misc]
    report = json.loads(logs(cluster, "trainer").splitlines()[-1])
    assert report["episodes"] == episodes
    assert len(report["hosts"]) == WORKERS


def test_the_storage_grows_shrinks_and_rolls_under_load_without_losing_a_row(
    installed: tuple[Cluster, float], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = installed
    queue = yaml.safe_load((CHART / "examples" / "laptop" / "queue.yaml").read_text())
    queue["metadata"]["namespace"], name = NAMESPACE, queue["metadata"]["name"]
    apply(cluster, queue)
    cluster.kubectl("wait", "-n", NAMESPACE, f"tq/{name}", "--for=condition=Ready", "--timeout=120s")
    apply(cluster, job("changes", "changes.py", "node2", [], queue=name))
    wait_until(lambda: "reading" in logs(cluster, "changes"), "rows are put and read", 120)

    def units() -> dict[str, str]:
        """Storage pods that run, and the revision of each."""
        selector = cluster.kubectl("get", "tq", name, "-n", NAMESPACE, "-o", "jsonpath={.status.storage.selector}")
        pods = json.loads(cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", selector, "-o", "json"))["items"]
        return {
            pod["metadata"]["name"]: pod["metadata"]["labels"]["controller-revision-hash"]
            for pod in pods
            if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        }

    def scaled(replicas: int) -> None:
        began = time.monotonic()
        cluster.kubectl("scale", "-n", NAMESPACE, f"tq/{name}", f"--replicas={replicas}")
        wanted = {f"{name}-storage-{number}" for number in range(replicas)}
        wait_until(lambda: set(units()) == wanted, f"{replicas} storage units", 120)
        with capsys.disabled():
            print(f" to {replicas} units: {time.monotonic() - began:.0f} s ", end="")

    scaled(3)
    scaled(2)
    before, began = units(), time.monotonic()
    queue["spec"]["storage"] |= {"replicas": 2, "annotations": {"example.com/rolled": "yes"}}
    apply(cluster, queue)

    def rolled() -> bool:
        now = units()
        return set(now) == set(before) and not set(now.values()) & set(before.values())

    wait_until(rolled, "both storage units were replaced", 180)
    with capsys.disabled():
        print(f" rolled: {time.monotonic() - began:.0f} s ", end="")
    pod = cluster.kubectl("get", "pods", "-n", NAMESPACE, "-l", "job-name=changes", "-o", "name").strip()
    cluster.kubectl("exec", "-n", NAMESPACE, pod, "--", "tq", "put", "control", "stop", "x=1")
    wait_until(lambda: finished(cluster, "changes"), "Job changes is complete", 60)
    report = json.loads(logs(cluster, "changes").splitlines()[-1])
    assert report["read"] > report["put"] > 0


def test_wrong_yaml_is_refused_with_the_words_of_tq_up(installed: tuple[Cluster, float]) -> None:
    cluster, _ = installed
    wrong = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    wrong["metadata"] = {"name": "wrong", "namespace": "default"}
    wrong["spec"]["backend"]["simple"] = {}
    with pytest.raises(ClusterError, match="exactly one of simple, mooncake, yuanrong, ray"):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(wrong))


def test_delete_and_uninstall_leave_nothing(installed: tuple[Cluster, float]) -> None:
    cluster, _ = installed
    cluster.kubectl("delete", "tq", "--all", "-n", NAMESPACE, "--timeout=60s")
    cluster.kubectl("delete", "job", "--all", "-n", NAMESPACE, "--timeout=60s")

    def left() -> list[str]:
        names = cluster.kubectl("get", KINDS, "-n", NAMESPACE, "-o", "name").split()
        known = ("configmap/jobs", "configmap/kube-root-ca.crt", "serviceaccount/default")
        return [name for name in names if name not in known]

    wait_until(lambda: not left(), "the queue's children are gone", 120)
    cluster.helm("uninstall", "transferqueue", "-n", SYSTEM, "--wait", "--timeout=120s")
    wait_until(lambda: not ours(cluster), "nothing of the chart is left", 60)

    def system() -> list[str]:
        return sorted(cluster.kubectl("get", KINDS, "-n", SYSTEM, "-o", "name").split())

    wait_until(lambda: system() == ["configmap/kube-root-ca.crt", "serviceaccount/default"], f"{SYSTEM} is empty", 60)
