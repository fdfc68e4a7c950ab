"""Two replicas: one writes, both admit; missing rights are named.

In a file before the session's own operator starts, which would do their work.
"""

from __future__ import annotations

import json
import signal
import ssl
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import Operator, environment, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port, process
from tests.waiting import wait_until
from tq_operator.runtime.lease import LeaseTimes
from tq_operator.runtime.rights import NEEDED

pytestmark = pytest.mark.timeout(1200)

QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec: {backend: {simple: {}}}
"""
LEASE = "replicas"


def holder(plane: ControlPlane) -> str:
    lease = plane.get("lease", LEASE, "tq-system") or {}
    return str(lease.get("spec", {}).get("holderIdentity", ""))


def admitted(plane: ControlPlane, port: int, queue: str) -> bool:
    """Whether the replica on ``port`` injects a pod."""
    pod = {"metadata": {"labels": {"transferqueue.io/inject": queue}}, "spec": {"containers": [{"name": "t"}]}}
    review = {"request": {"uid": "u", "namespace": "default", "object": pod}}
    context = ssl.create_default_context(cafile=str(plane.authority.files.certificate))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(f"https://127.0.0.1:{port}/inject", json.dumps(review).encode(), timeout=15) as answer:
        response = json.loads(answer.read())["response"]
    return bool(response["allowed"] and response["patch"])


def metrics(running: Operator) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.health}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_another_replica_goes_on_and_admission_never_stops(
    plane: ControlPlane, certificates: Path, tmp_path: Path, end: signal.Signals
) -> None:
    assert LeaseTimes().takeover <= 15
    replicas: dict[str, tuple[Operator, int]] = {}
    names = [f"replicas-{end.name.lower()}-{part}" for part in ("first", "second")]
    command = [sys.executable, "-m", "tq_operator"]

    def variables(port: int, health: int) -> dict[str, str]:
        return environment(plane, certificates, port, health, TQ_LEASE_NAME=LEASE, TQ_RESYNC_SECONDS="300")

    ports = [(free_port(), free_port()) for _ in range(2)]
    with (
        process(command, tmp_path / "0.log", **variables(*ports[0])) as first,
        process(command, tmp_path / "1.log", **variables(*ports[1])) as second,
    ):
        for position, child in enumerate((first, second)):
            port, health = ports[position]
            replicas[f"operator-{health}"] = (Operator(plane, child, health, tmp_path / f"{position}.log"), port)
        for running, _ in replicas.values():
            wait_until(running.ready, "both replicas are ready", 60)
        wait_until(lambda: holder(plane) in replicas, "one of them leads", 60)
        plane.apply(QUEUE.replace("NAME", names[0]))
        wait_until(lambda: plane.get("statefulset", f"{names[0]}-storage"), "the leader works", 60)
        assert all(admitted(plane, port, names[0]) for _, port in replicas.values())
        leader = holder(plane)
        (dying, _), ((survivor, port),) = replicas[leader], [replicas[name] for name in replicas if name != leader]
        assert "tq_operator_leader 1.0" in metrics(dying)
        assert "tq_operator_leader 0.0" in metrics(survivor)
        assert "applied" not in survivor.log.read_text(), "only the leader writes"
        dying.child.send_signal(end)
        plane.apply(QUEUE.replace("NAME", names[1]))

        def taken_over() -> Any:
            assert admitted(plane, port, names[1])
            return plane.get("statefulset", f"{names[1]}-storage")

        wait_until(taken_over, "the survivor goes on", 60)
        wait_until(lambda: holder(plane) not in ("", leader), "the survivor holds the lease", 60)
        assert "tq_operator_leader 1.0" in metrics(survivor)
    for name in names:
        plane.kubectl("delete", "transferqueue", name)


def test_of_two_releases_that_overlap_one_keeps_a_queue_until_it_ends(
    plane: ControlPlane, certificates: Path, tmp_path: Path
) -> None:
    name, command = "overlapping", [sys.executable, "-m", "tq_operator"]

    def image() -> str:
        deployment = plane.get("deployment", f"{name}-controller") or {}
        containers = deployment.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [{}])
        return str(containers[0].get("image", ""))

    def keeper() -> str:
        return str((plane.get("transferqueue", name) or {}).get("status", {}).get("operator", ""))

    def log(release: str) -> str:
        return (tmp_path / f"{release}.log").read_text()

    with ExitStack() as stack:
        children = {}
        for release in ("first", "second"):
            health = free_port()
            images = {"TQ_IMAGE_SERVER": f"{release}:1", "TQ_LEASE_NAME": release}
            variables = environment(plane, certificates, free_port(), health, **images)
            child = stack.enter_context(process(command, tmp_path / f"{release}.log", **variables))
            children[release] = child
            wait_until(Operator(plane, child, health, tmp_path / f"{release}.log").ready, "it is ready", 60)
        plane.apply(QUEUE.replace("NAME", name))

        def leaving() -> str:
            words = f"leaves this queue to the operator {keeper()}, which"
            return next((release for release in children if words in log(release)), "")

        other = wait_until(leaving, "one of them leaves it to the other", 60)
        (kept,) = children.keys() - {other}
        writes = log(other).count("applied ")
        plane.kubectl("patch", "tq", name, "--type=merge", "-p", '{"spec": {"controller": {"port": 50123}}}')

        def settled() -> bool:
            queue = plane.get("transferqueue", name) or {}
            return bool(queue["status"]["observedGeneration"] == queue["metadata"]["generation"])

        wait_until(settled, "the change is made", 60)
        assert image() == f"{kept}:1"
        assert log(other).count("applied ") == writes
        children[kept].send_signal(signal.SIGTERM)
        wait_until(lambda: keeper() == f"tq-system/{other}", "the other one takes over", 60)
        wait_until(lambda: image() == f"{other}:1", "with images of its own", 60)
        plane.kubectl("delete", "transferqueue", name)


def test_the_chart_gives_exactly_the_rights_that_are_checked(plane: ControlPlane) -> None:
    (role,) = [item for item in rendered_chart(plane, "--set", "watchNamespaces={a}") if item["kind"] == "Role"][1:]
    given: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for name in rule["resources"]:
                given.setdefault((group, name), set()).update(rule["verbs"])
    assert given == {key: set(verbs) for key, verbs in NEEDED.items()}


def test_missing_rights_are_named_and_keep_the_replica_from_being_ready(
    plane: ControlPlane, certificates: Path, tmp_path: Path
) -> None:
    rules = [
        {"apiGroups": ["transferqueue.io"], "resources": ["transferqueues"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "list", "watch", "create"]},
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "few"}, "kind": "ClusterRole"}
    plane.apply(yaml.safe_dump({**role, "rules": rules}))
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "few"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "few"}
    plane.apply(yaml.safe_dump({**role, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]}))
    health = free_port()
    variables = environment(plane, certificates, free_port(), health, TQ_LEASE_NAMESPACE="")
    variables["KUBECONFIG"] = str(plane.kubeconfig_for("few"))
    with process([sys.executable, "-m", "tq_operator"], tmp_path / "log", **variables) as child:

        def words() -> str:
            assert child.poll() is None, (tmp_path / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{health}/readyz", timeout=5)
            except urllib.error.HTTPError as error:
                text = error.read().decode()
                return text if "missing rights" in text else ""
            except urllib.error.URLError:
                return ""
            raise AssertionError("ready without its rights")

        found = wait_until(words, "the missing rights are named", 60)
    assert "patch deployments.apps in all namespaces" in found
    assert "get deployments.apps" not in found
