"""KubeRay's own operator on the real cluster: the pods of a RayCluster use a queue that their label names."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.binaries import TEST_BINARIES, build_binaries, go_command
from tests.cluster.cluster import Cluster
from tests.cluster.images import image_reference
from tests.cluster.oci import write_archive
from tests.cluster.paths import SOURCE, state_folder
from tests.cluster.product import NAMESPACE, apply, queue, wait_ready
from tq_operator.plan.names import INJECT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE, CLUSTER, HEAD = "shared", "rays", "ray.io/node-type=head"
MODULE = "github.com/ray-project/kuberay/ray-operator"


def manifests() -> Path:
    """KubeRay's own, as `kubectl apply -k` takes them: in the namespace default."""
    command = [go_command(), "mod", "download", "-json", MODULE]
    done = subprocess.run(command, cwd=SOURCE / "go" / "kuberay", capture_output=True, text=True, check=True)
    return Path(json.loads(done.stdout)["Dir"]) / "config" / "default"


@pytest.fixture(scope="module")
def kuberay(installed: Cluster) -> Iterator[Cluster]:
    """The cluster with KubeRay's operator, built from its source, and an image with Ray."""
    installed.load("ray")
    rendered = installed.kubectl("kustomize", str(manifests()))
    rendered = rendered.replace("runAsNonRoot: true\n", "runAsNonRoot: true\n        runAsUser: 65532\n")
    (image,) = {line.split()[-1] for line in rendered.splitlines() if line.strip().startswith("image: ")}
    archive = state_folder() / "kuberay.tar"
    write_archive(archive, image, {"/manager": build_binaries(TEST_BINARIES) / "kuberay"}, ["/manager"])
    installed.load(str(archive))
    try:
        installed.kubectl("apply", "--server-side", "-f", "-", stdin=rendered)
        installed.kubectl("rollout", "status", "deployment/kuberay-operator", "--timeout=120s")
        yield installed
    finally:
        installed.kubectl("delete", "--ignore-not-found", "--timeout=120s", "-f", "-", stdin=rendered)


def pods(node: str) -> dict[str, Any]:
    """What a RayCluster says of the pods of a group: one on `node`. All that it says of the queue is the label."""
    container = {
        "name": "ray",
        "image": image_reference("ray"),
        "imagePullPolicy": "Never",
        "resources": {"limits": {"cpu": "1", "memory": "2Gi"}, "requests": {"cpu": "100m", "memory": "1Gi"}},
        "volumeMounts": [{"name": "jobs", "mountPath": "/jobs"}],
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "jobs", "configMap": {"name": "jobs"}}],
    }
    return {"rayStartParams": {}, "template": {"metadata": {"labels": {INJECT_LABEL: QUEUE}}, "spec": spec}}


@pytest.fixture(scope="module")
def rays(kuberay: Cluster) -> Iterator[Cluster]:
    """The cluster with a queue, and a RayCluster of a head on one node and a worker on the other."""
    apply(kuberay, queue(QUEUE, backend={"simple": {}}, storage={"replicas": 1, "capacity": "64Mi"}))
    wait_ready(kuberay, QUEUE)
    workers = {"groupName": "workers", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, **pods("node2")}
    spec = {"headGroupSpec": pods("node1"), "workerGroupSpecs": [workers]}
    metadata = {"name": CLUSTER, "namespace": NAMESPACE}
    apply(kuberay, {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec})
    kuberay.kubectl(
        "wait", "-n", NAMESPACE, f"raycluster/{CLUSTER}", "--for=condition=RayClusterProvisioned", "--timeout=180s"
    )
    yield kuberay
    kuberay.kubectl("delete", "-n", NAMESPACE, f"raycluster/{CLUSTER}", f"tq/{QUEUE}", "--timeout=60s")


def test_actors_of_a_ray_job_on_both_nodes_put_and_get_through_the_queue_of_their_label(rays: Cluster) -> None:
    find = (
        "get",
        "pod",
        "-n",
        NAMESPACE,
        "-l",
        f"ray.io/cluster={CLUSTER},{HEAD}",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    )
    job = ("ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--", "python", "/jobs/ray_nodes.py")
    said = rays.kubectl("exec", "-n", NAMESPACE, rays.kubectl(*find), "-c", "ray", "--", *job)
    found = next(json.loads(line) for line in said.splitlines() if line.startswith("[{"))
    assert len({each.pop("host") for each in found}) == 2
    assert found == [{"injected": True, "rows": 32, "same": True}] * 2
