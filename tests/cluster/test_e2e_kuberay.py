"""KubeRay's and cert-manager's own controllers on the real cluster: the pods of a RayCluster use a queue that their
label names, with certificates of an issuer."""

from __future__ import annotations

import base64
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
from tests.cluster.pki import Authority
from tests.cluster.product import NAMESPACE, access, apply, queue, wait_ready
from tests.integration.operator.control_plane import process
from tq_operator.plan.names import INJECT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE, CLUSTER, HEAD = "shared", "rays", "ray.io/node-type=head"
KUBERAY, CERT_MANAGER = "github.com/ray-project/kuberay/ray-operator", "github.com/cert-manager/cert-manager"
ISSUER = "corporate"


def source(folder: str, module: str) -> Path:
    """Where the source of a Go module lies that the module ``folder`` of the cluster tool pins."""
    command = [go_command(), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=SOURCE / "go" / folder, capture_output=True, text=True, check=True)
    return Path(json.loads(done.stdout)["Dir"])


@pytest.fixture(scope="module")
def kuberay(installed: Cluster) -> Iterator[Cluster]:
    """The cluster with KubeRay's operator, built from its source, and an image with Ray."""
    installed.load("ray")
    rendered = installed.kubectl("kustomize", str(source("kuberay", KUBERAY) / "config" / "default"))
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


@pytest.fixture(scope="module")
def issuer(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """cert-manager, and an Issuer of a CA of one's own in the namespace."""
    folder = tmp_path_factory.mktemp("cert-manager")
    definitions = [
        word
        for path in sorted((source("certmanager", CERT_MANAGER) / "deploy" / "crds").glob("cert-manager.io_*.yaml"))
        for word in ("-f", str(path))
    ]
    files = Authority(folder).files
    content = {"tls.crt": files.certificate, "tls.key": files.key}
    data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in content.items()}
    metadata = {"name": ISSUER, "namespace": NAMESPACE}
    objects = (
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": data},
        {
            "apiVersion": "cert-manager.io/v1",
            "kind": "Issuer",
            "metadata": metadata,
            "spec": {"ca": {"secretName": ISSUER}},
        },
    )
    try:
        installed.kubectl("apply", "--server-side", *definitions)
        installed.kubectl("wait", "--for=condition=Established", "--timeout=60s", *definitions)
        apply(installed, *objects)
        command = [str(build_binaries(TEST_BINARIES) / "cert-manager"), f"--kubeconfig={installed.kubeconfig}"]
        with process(command, folder / "log"):
            yield ISSUER
    finally:
        installed.kubectl("delete", "secret", ISSUER, "-n", NAMESPACE, "--ignore-not-found")
        installed.kubectl("delete", "--ignore-not-found", "--timeout=120s", *definitions)


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
def rays(kuberay: Cluster, issuer: str) -> Iterator[Cluster]:
    """The cluster with a queue, and a RayCluster of a head on one node and a worker on the other."""
    security = {"tls": {"mode": "issuer", "issuerRef": {"name": issuer, "kind": "Issuer"}}}
    storage = {"replicas": 1, "capacity": "64Mi"}
    apply(kuberay, queue(QUEUE, backend={"simple": {}}, storage=storage, security=security))
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
    assert access(rays).queue(QUEUE)["status"]["tls"] == "issuer"
