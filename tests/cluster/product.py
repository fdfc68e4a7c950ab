"""What the end-to-end tests do with the product: install it as the docs say, run Jobs that use it, look at it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from kubernetes.dynamic.exceptions import NotFoundError

from tests.cluster import cgroups
from tests.cluster.cluster import Cluster
from tests.cluster.commands import run
from tests.cluster.component import wait_until
from tests.cluster.errors import ClusterError
from tests.cluster.images import image_reference
from tests.cluster.oci import write_archive
from tests.cluster.paths import REPOSITORY, state_folder
from tests.unit.operator.signals import same_signals
from tq_operator.kubectl import main
from tq_operator.kubectl.access import Access, connect
from tq_operator.plan.names import QUEUE_LABEL
from tq_operator.runtime.cluster import ClusterError as CallError

CHART = REPOSITORY / "charts" / "transferqueue"
JOBS = Path(__file__).parent / "jobs"
SYSTEM, NAMESPACE, RELEASE = "transferqueue-system", "training", "transferqueue"
OPERATOR = f"{RELEASE}-operator"
ETCD_IMAGE = "localhost/etcd:dev"
PAGE = REPOSITORY / "docs" / "quickstart-cluster.md"
CLUSTER_KINDS = "crd,clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations"


def blocks(page: Path) -> list[str]:
    """The shell blocks of a page of the docs, in their order."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def follow(cluster: Cluster, commands: str) -> str:
    """Run shell commands of the docs in the repository, as somebody whose namespace is NAMESPACE; give their stdout."""
    kubeconfig = state_folder() / "user.kubeconfig"
    config = json.loads(cluster.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = NAMESPACE
    kubeconfig.write_text(json.dumps(config))
    path = f"{state_folder() / 'tools'}:{os.environ['PATH']}"
    return run(["bash", "-euc", commands], cwd=REPOSITORY, environment={"KUBECONFIG": str(kubeconfig), "PATH": path})


def publish(cluster: Cluster) -> None:
    """Put the product's images on the nodes, under the names of the chart too, and an etcd for masters."""
    names = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    for image in ("operator", "server", "mooncake", "trainer"):
        cluster.load(image)
        if image in names:
            for node in cluster.nodes:
                node.name_image(image_reference(image), f"docker.io/{names[image]}")
    archive = state_folder() / "etcd.tar"
    programs = {f"/usr/local/bin/{name}": cluster.binaries / name for name in ("etcd", "etcdctl")}
    write_archive(archive, ETCD_IMAGE, programs, ["/usr/local/bin/etcd"])
    cluster.load(str(archive))


def ours(cluster: Cluster) -> list[str]:
    """Names of all cluster-wide objects that belong to the product."""
    names = cluster.kubectl("get", CLUSTER_KINDS, "-o", "name").split()
    return sorted(name for name in names if "transferqueue" in name)


def remove(cluster: Cluster) -> None:
    """Take the product off the cluster, whatever is left of it."""
    cluster.kubectl("delete", "jobs", "--all", "-n", NAMESPACE, "--timeout=60s")
    if "customresourcedefinition.apiextensions.k8s.io/transferqueues.transferqueue.io" in ours(cluster):
        cluster.kubectl("delete", "tq", "--all", "-n", NAMESPACE, "--timeout=60s")
    # A namespace with pods that may take ten minutes to end is looked at again after five, though they end at once.
    cluster.kubectl("delete", "pods", "-n", NAMESPACE, "-l", QUEUE_LABEL, "--timeout=90s")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=120s", "--ignore-not-found")
    cluster.kubectl("delete", "crd", "-l", "app.kubernetes.io/part-of=transferqueue", "--ignore-not-found")
    cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=120s")


def access(cluster: Cluster) -> Access:
    """Calls to the API server without a kubectl for each."""
    return connect(str(cluster.kubeconfig), None, NAMESPACE)


def tq(cluster: Cluster, *arguments: str) -> str:
    """Run kubectl tq as administrator in NAMESPACE and return its stdout. Raises ClusterError with its message.

    In this process, as a new one spends seconds on its start.
    """
    said, told = io.StringIO(), io.StringIO()
    with same_signals(), redirect_stdout(said), redirect_stderr(told):
        code = main([*arguments, "--kubeconfig", str(cluster.kubeconfig), "-n", NAMESPACE])
    if code:
        raise ClusterError(f"kubectl tq {arguments[0]}: exit status {code}\n{said.getvalue()}{told.getvalue()}")
    return said.getvalue()


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    """Create or update `objects`."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def queue(name: str, **spec: Any) -> dict[str, Any]:
    """A TransferQueue in NAMESPACE."""
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "transferqueue.io/v1alpha1", "kind": "TransferQueue", "metadata": metadata, "spec": spec}


def wait_ready(cluster: Cluster, name: str) -> None:
    """Wait until queue `name` is Ready."""
    cluster.kubectl("wait", "-n", NAMESPACE, f"tq/{name}", "--for=condition=Ready", "--timeout=120s")


def job(name: str, script: str, node: str, arguments: list[str], queue: str, completions: int = 1) -> dict[str, Any]:
    """A Job that runs `script` of jobs/ on `node`; the label is all that it says of the queue."""
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
        "terminationGracePeriodSeconds": 1,
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


def scripts() -> dict[str, Any]:
    """The ConfigMap that Jobs have their scripts from."""
    data = {file.name: file.read_text() for file in JOBS.glob("*.py")}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "jobs", "namespace": NAMESPACE},
        "data": data,
    }


def logs(cluster: Cluster, name: str) -> str:
    """What Job `name` has printed so far; nothing while its pod starts."""
    calls, pods = access(cluster).cluster, f"/api/v1/namespaces/{NAMESPACE}/pods"
    try:
        found = calls.call("GET", pods, query=[("labelSelector", f"job-name={name}")])["items"]
        return calls.read(f"{pods}/{found[0]['metadata']['name']}/log") if found else ""
    except (NotFoundError, CallError):
        return ""


def finish(cluster: Cluster, names: Iterable[str], seconds: float = 180) -> None:
    """Wait until the Jobs have succeeded; one that failed ends the test with its log."""

    def complete(name: str) -> bool:
        job = access(cluster).cluster.call("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}")
        status = job.get("status", {})
        assert not status.get("failed"), cluster.kubectl("logs", "-n", NAMESPACE, f"job/{name}", "--tail=40")
        return any(each["type"] == "Complete" and each["status"] == "True" for each in status.get("conditions", []))

    for name in names:
        wait_until(lambda name=name: complete(name), f"Job {name} is complete", seconds)  # type: ignore[misc]


def report(cluster: Cluster, name: str) -> dict[str, Any]:
    """The last line of what Job `name` printed."""
    found: dict[str, Any] = json.loads(logs(cluster, name).splitlines()[-1])
    return found


def pod_of(cluster: Cluster, name: str) -> str:
    """The pod of Job `name`."""
    chosen = ("-l", f"job-name={name}", "-o", "jsonpath={.items[0].metadata.name}")
    return cluster.kubectl("get", "pods", "-n", NAMESPACE, *chosen)


def node_of(cluster: Cluster, namespace: str, pod: str) -> str:
    """The node that a pod runs on."""
    return cluster.kubectl("get", "pod", pod, "-n", namespace, "-o", "jsonpath={.spec.nodeName}")


@contextmanager
def hanging_kubelet(cluster: Cluster, node: str) -> Iterator[None]:
    """A node whose kubelet does nothing, so that containers that were killed are not started again at once."""
    (pid,) = (each.kubelet.pid() for each in cluster.nodes if each.name == node)
    assert pid is not None, f"there is no kubelet on {node}"
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill(cluster: Cluster, namespace: str, pod: str, argument: str = "") -> float:
    """SIGKILL to the containers of a pod, as the kernel does when memory is out. Gives time.monotonic() of it.

    `argument`: only to processes that have it in their command line.
    """
    uid = cluster.kubectl("get", "pod", pod, "-n", namespace, "-o", "jsonpath={.metadata.uid}")
    killed = 0
    for pid in cgroups.members():
        try:
            groups, program = Path(f"/proc/{pid}/cgroup").read_text(), Path(f"/proc/{pid}/comm").read_text().strip()
            called = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if f"pod{uid}" in groups and program != "pause" and argument in called:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    assert killed, f"pod {pod} has no process {argument}"
    return time.monotonic()
