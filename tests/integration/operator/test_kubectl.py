"""``kubectl tq`` against a real apiserver with the operator at work. There is no kubelet: the tests play it."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import RELEASE, REPOSITORY, Operator, rendered_chart
from tests.integration.operator.control_plane import ControlPlane
from tests.unit.operator.signals import same_signals
from tests.waiting import meanwhile, wait_until
from tq_operator.kubectl import main
from tq_operator.runtime.trust import renewed

pytestmark = pytest.mark.timeout(1200)  # the first run builds Kubernetes

NAMESPACE = "kubectl"
# One word for each place that may hold a secret, so that a leak names its place.
PLACES = ("env", "annotation", "queue-annotation", "sidecar", "secret", "config-map", "own-config-map", "event", "log")
WORDS = {place: f"planted-in-{place}-xyzzy" for place in PLACES}
QUEUE = {
    "apiVersion": "transferqueue.io/v1alpha1",
    "kind": "TransferQueue",
    "metadata": {"name": "q", "namespace": NAMESPACE, "annotations": {"example.com/note": WORDS["queue-annotation"]}},
    "spec": {
        "backend": {"simple": {}},
        "storage": {
            "replicas": 2,
            "capacity": "64Mi",
            "annotations": {"example.com/login": WORDS["annotation"]},
            "env": [
                {"name": "SETTING", "value": WORDS["env"]},
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "login", "key": "word"}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "more", "key": "word"}}},
            ],
            "extraContainers": [{"name": "proxy", "image": "proxy:1", "args": [f"--login={WORDS['sidecar']}"]}],
        },
    },
}
OTHERS = [
    {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}, "stringData": {"word": WORDS["secret"]}},
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}, "data": {"word": WORDS["config-map"]}},
]


def pods(plane: ControlPlane, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plane.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return found


def set_status(plane: ControlPlane, namespace: str, pod: str, status: dict[str, Any]) -> None:
    words = ("patch", "pod", pod, "-n", namespace, "--subresource=status", "-p", json.dumps({"status": status}))
    done = plane.kubectl(*words)
    assert done.returncode == 0 or "not found" in done.stderr, done.stderr


def start_pods(plane: ControlPlane, namespace: str = NAMESPACE) -> None:
    """What a kubelet does with pods that wait."""
    for pod in pods(plane, namespace):
        if pod["status"].get("podIP") or "deletionTimestamp" in pod["metadata"]:
            continue
        containers = [
            {"name": each["name"], "image": each["image"], "imageID": "", "ready": True, "restartCount": 0}
            for each in pod["spec"]["containers"]
        ]
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": "10.0.0.9", "conditions": [ready], "containerStatuses": containers}
        set_status(plane, namespace, pod["metadata"]["name"], status)


def started(plane: ControlPlane, kind: str, name: str, namespace: str) -> bool:
    start_pods(plane, namespace)
    found = plane.get(kind, name, namespace) or {}
    return bool(found.get("status", {}).get("readyReplicas") == found.get("spec", {}).get("replicas"))


def is_ready(plane: ControlPlane) -> bool:
    start_pods(plane)
    conditions = (plane.get("transferqueue", "q", NAMESPACE) or {}).get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def webhook_secret() -> dict[str, Any]:
    """As an operator in the cluster makes it."""
    hosts, year = ["tq-operator.tq-system.svc"], timedelta(days=365)
    content = renewed({}, "tq-operator", hosts, year, datetime.now(timezone.utc)) or {}
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    metadata = {"name": "tq-operator-webhook-tls", "namespace": RELEASE[1]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


@pytest.fixture(scope="module")
def cluster(operator: Operator) -> Iterator[ControlPlane]:
    """An apiserver with a queue that is Ready, and the objects that the chart makes for the operator."""
    plane = operator.plane
    for namespace in (NAMESPACE, RELEASE[1]):
        plane.kubectl("create", "namespace", namespace)
        wait_until(lambda namespace=namespace: plane.get("serviceaccount", "default", namespace), "accounts exist")
    for manifest in [*OTHERS, QUEUE]:
        plane.apply(yaml.safe_dump({**manifest, "metadata": {**manifest["metadata"], "namespace": NAMESPACE}}))  # type: ignore[dict-item]
    installed = [each for each in rendered_chart(plane) if each["kind"] in ("ServiceAccount", "Deployment")]
    installed.append(webhook_secret())
    for manifest in installed:
        if manifest["kind"] == "Deployment":
            env = manifest["spec"]["template"]["spec"]["containers"][0]["env"]
            next(each for each in env if each["name"] == "TQ_LEASE_NAME")["value"] = "transferqueue-operator"
        plane.apply(yaml.safe_dump(manifest))
    wait_until(lambda: len(pods(plane)) == 3 and is_ready(plane), "the queue is Ready", 60)
    wait_until(lambda: started(plane, "deployment", "tq-operator", RELEASE[1]), "the operator's Deployment is ready")
    yield plane
    plane.kubectl("delete", "transferqueue", "q", "-n", NAMESPACE)
    for manifest in installed:
        plane.kubectl("delete", manifest["kind"], manifest["metadata"]["name"], "-n", RELEASE[1])


class Command:
    """``kubectl tq`` as its administrator, in this process."""

    def __init__(self, plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
        self._plane, self._capsys = plane, capsys

    def __call__(self, *arguments: str, code: int = 0, kubeconfig: Path | None = None) -> tuple[str, str]:
        """Standard output and error."""
        self._capsys.readouterr()
        with same_signals():
            name = str(kubeconfig or self._plane.kubeconfig)
            ended = main([*arguments, "--kubeconfig", name, *([] if "-n" in arguments else ["-n", NAMESPACE])])
        out, err = self._capsys.readouterr()
        assert ended == code, f"{arguments}: {ended}\n{out}\n{err}"
        return out, err

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "-o", "json", code=code)[0])


@pytest.fixture
def tq(cluster: ControlPlane, capsys: pytest.CaptureFixture[str]) -> Command:
    wait_until(lambda: is_ready(cluster), "the queue is Ready")
    return Command(cluster, capsys)


BINDING = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueueBinding
metadata: {name: trainers, namespace: NAMESPACE}
spec: {queue: {name: q, namespace: kubectl}, selector: {matchLabels: {app: verl}}}
"""


@contextmanager
def bound(plane: ControlPlane, namespace: str) -> Iterator[None]:
    plane.kubectl("create", "namespace", namespace)
    plane.apply(BINDING.replace("NAMESPACE", namespace))
    try:
        wait_until(lambda: (plane.get("tqb", "trainers", namespace) or {}).get("status"), "the binding is looked at")
        yield
    finally:
        plane.kubectl("delete", "tqb", "trainers", "-n", namespace)


def test_status_shows_conditions_parts_endpoints_and_bindings_in_every_form(cluster: ControlPlane, tq: Command) -> None:
    with bound(cluster, NAMESPACE):
        found = tq.json("status", "q")
        assert yaml.safe_load(tq("status", "q", "-o", "yaml")[0]) == found
        table = tq("status")[0]
    conditions = {each["type"]: each["status"] for each in found["conditions"]}
    assert conditions == {"Ready": "True", "Progressing": "False", "Degraded": "False"}
    assert [(each["part"], each["ready"], len(each["pods"])) for each in found["parts"]] == [
        ("controller", 1, 1),
        ("storage", 2, 2),
    ]
    assert found["endpoints"]["controller"] == "q-controller.kubectl.svc:50060"
    assert (found["storage"]["ready"], found["storage"]["capacity"]) == (2, "128Mi")
    assert [(each["name"], each["bound"]) for each in found["bindings"]] == [("trainers", "True")]
    for word in ("AllReady", "q-storage-1", "q-controller.kubectl.svc:50060", "2 of 2 storage units", "trainers"):
        assert word in table


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("status", "other"), 1, "TransferQueue other is not in namespace kubectl; there: q"),
        (("status", "-n", "default-none"), 1, "no TransferQueue is in namespace default-none"),
        (("status", "--context", "none"), 2, "name one with --kubeconfig, and a context of it with --context"),
        (("failover",), 2, "--allow-data-loss"),
        (("failover", "--part", "mooncake-master", "--allow-data-loss"), 2, "has no pod of the part mooncake-master"),
        (("drain", "q-storage-7"), 2, "no storage unit of the queue; there are: q-storage-0, q-storage-1"),
        (("logs", "--since", "soon"), 2, "write for example 30s, 10m or 1h30m"),
        (("top", "--once"), 1, "the controller cannot be reached through the apiserver: pod q-controller"),
        (("drain", "q-storage-0"), 1, "cannot run a command in pod q-storage-0: pod q-storage-0 does not have a host"),
        (("port-forward", "q", "web"), 2, "with one of: transferqueue (50060), metrics ("),
    ],
)
def test_what_does_not_work_is_one_line_with_the_cause(tq: Command, arguments: Any, code: int, words: str) -> None:
    out, err = tq(*arguments, code=code)
    assert out == ""
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err


def test_an_apiserver_that_does_not_answer_is_named(tmp_path: Path, tq: Command, cluster: ControlPlane) -> None:
    silent = tmp_path / "config"
    silent.write_text(cluster.kubeconfig.read_text().replace(cluster.server, "https://127.0.0.1:9"))
    found = tq("doctor", code=1, kubeconfig=silent)[0].splitlines()
    assert found[0].startswith("fail apiserver: https://127.0.0.1:9: the apiserver does not answer")
    assert found[-1] == "0 ok, 0 warnings, 1 failures"


def test_a_context_brings_its_namespace(tmp_path: Path, cluster: ControlPlane) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    (context,) = config["contexts"]
    config["contexts"].append({"name": "there", "context": {**context["context"], "namespace": NAMESPACE}})
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    with same_signals():
        assert main(["status", "q", "--kubeconfig", str(tmp_path / "config"), "--context", "there"]) == 0


def test_whoever_may_read_nothing_is_told_which_right_lacks(cluster: ControlPlane, tq: Command) -> None:
    nobody = cluster.kubeconfig_for("nobody")
    assert 'cannot list resource "transferqueues"' in tq("status", code=1, kubeconfig=nobody)[1]
    findings = tq("doctor", "q", kubeconfig=nobody)[0]
    assert "warn definitions: cannot be looked at" in findings
    assert "fix: ask for the right to read it" in findings


def test_doctor_finds_nothing_wrong_but_what_a_missing_kubelet_explains(tq: Command) -> None:
    found = tq.json("doctor", code=1)
    assert [each["check"] for each in found if each["state"] == "fail"] == ["controller"]
    (controller,) = (each for each in found if each["check"] == "controller")
    assert "does not have a host assigned" in controller["text"]
    well = {each["check"] for each in found if each["state"] == "ok"}
    assert well >= {"apiserver", "definitions", "operator", "leader", "webhook", "certificate", "queue", "admission"}


def wrong_queue() -> dict[str, Any]:
    rdma = {"policy": "required", "resourceName": "rdma/none"}
    spec = {"backend": {"mooncake": {"protocol": "rdma", "globalSegmentSize": "256Mi"}}, "rdma": rdma}
    return {**QUEUE, "metadata": {"name": "r", "namespace": NAMESPACE}, "spec": spec}


def test_doctor_names_every_planted_fault_with_its_fix(cluster: ControlPlane, tq: Command) -> None:
    killed = {"name": "storage", "image": "s:1", "imageID": "", "ready": False, "restartCount": 3}
    killed |= {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "planted", "namespace": NAMESPACE},
        "involvedObject": {"kind": "Pod", "name": "q-storage-0", "namespace": NAMESPACE},
        "type": "Warning",
        "reason": "FailedMount",
        "message": "the disk is away",
    }
    hook = cluster.get("mutatingwebhookconfiguration", "tq-operator") or {}
    operator_pod = pods(cluster, RELEASE[1])[0]["metadata"]["name"]
    not_ready = {"conditions": [{"type": "Ready", "status": "False"}]}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(event))
    cluster.kubectl("run", "missed", "--image=t:1", "-n", NAMESPACE)
    cluster.kubectl("label", "pod", "missed", "transferqueue.io/inject=q", "-n", NAMESPACE)
    cluster.apply(yaml.safe_dump(wrong_queue()))
    set_status(cluster, NAMESPACE, "q-storage-0", {"containerStatuses": [killed], **not_ready})
    set_status(cluster, RELEASE[1], operator_pod, not_ready)
    cluster.kubectl("delete", "mutatingwebhookconfiguration", "tq-operator")
    try:
        with bound(cluster, "strangers"):
            wait_until(lambda: not started_operator(cluster), "the Deployment is not ready")

            def faults() -> Any:
                found = [each for each in tq.json("doctor", code=1) if each["state"] != "ok"]
                return found if {"pods", "rdma", "queue"} <= {each["check"] for each in found} else None

            found = wait_until(faults, "the operator has looked at the queues")
    finally:
        hook["metadata"] = {key: hook["metadata"][key] for key in ("name", "labels")}
        cluster.apply(json.dumps(hook))
        cluster.kubectl("delete", "pod", "missed", "-n", NAMESPACE, "--force")
        cluster.kubectl("delete", "transferqueue", "r", "-n", NAMESPACE)
        set_status(cluster, RELEASE[1], operator_pod, {"conditions": [{"type": "Ready", "status": "True"}]})
        cluster.kubectl("delete", "pod", "q-storage-0", "-n", NAMESPACE, "--force")
    expected = {
        "operator": ("0 of 1 pods are ready", "kubectl logs -n tq-system deployment/tq-operator"),
        "webhook": ("1 of 2 webhook configurations", "helm upgrade --install"),
        "missed pods": ("missed asks for the queue q", "delete it once the webhook answers"),
        "pods": ("q-storage-0 was killed for using more memory", "raise the memory limit"),
        "events": ("q-storage-0: FailedMount", "kubectl describe"),
        "rdma": ("nodes offer 0 of rdma/none", "RDMA device plugin"),
        "bindings": ("strangers/trainers: NotAdmitted", "correct what the message names"),
        "admission": ("does not get the queue", "the webhook is gone"),
    }
    for check, (text, fix) in expected.items():
        assert [each for each in found if each["check"] == check and text in each["text"] and fix in each["fix"]], check
    assert {each["check"] for each in found} == {*expected, "queue"}


def started_operator(plane: ControlPlane) -> bool:
    found = plane.get("deployment", "tq-operator", RELEASE[1]) or {}
    return bool(found.get("status", {}).get("readyReplicas"))


def test_failover_replaces_the_controller_and_waits_until_the_queue_is_ready(
    cluster: ControlPlane, tq: Command
) -> None:
    def controller() -> str:
        names = [str(pod["metadata"]["name"]) for pod in pods(cluster)]
        (found,) = (name for name in names if name.startswith("q-controller"))  # another queue may still be ending
        return found

    old = controller()
    _, err = tq("failover", "q", "--allow-data-loss", "--timeout", "1", code=1)
    assert "not Ready again within 1 s: no new pod is ready; kubectl tq doctor says what is wrong" in err
    second = controller()
    assert second != old
    wait_until(lambda: is_ready(cluster), "the queue is Ready")
    with meanwhile(lambda: start_pods(cluster)):
        _, err = tq("failover", "--allow-data-loss")
    assert f"controller: {controller()} serves in place of {second}; Ready after " in err


def test_a_support_bundle_tells_everything_but_secrets(cluster: ControlPlane, tq: Command, tmp_path: Path) -> None:
    words = f"cannot log in with {WORDS['event']}: password={WORDS['event']}"
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "said", "namespace": NAMESPACE}}
    event |= {"involvedObject": {"kind": "Pod", "name": "q-storage-1", "namespace": NAMESPACE}, "reason": "Said"}
    cluster.kubectl(
        "create", "-f", "-", stdin=json.dumps({**event, "message": words.replace("log in with", "use token=")})
    )
    patch = json.dumps({"data": {"extra": WORDS["own-config-map"]}})
    assert cluster.kubectl("patch", "configmap", "q-config", "-n", NAMESPACE, "-p", patch).returncode == 0
    last = f"login {WORDS['secret']} {WORDS['config-map']} {WORDS['env']} api_key: {WORDS['log']}"
    state = {"name": "storage", "image": "s:1", "imageID": "", "ready": True, "restartCount": 1}
    state |= {"lastState": {"terminated": {"exitCode": 1, "message": last}}}
    set_status(cluster, NAMESPACE, "q-storage-1", {"containerStatuses": [state]})
    file = tmp_path / "bundle.tar.gz"
    out, err = tq("support-bundle", "q", "--file", str(file))
    assert out.strip() == str(file)
    assert "look through them before you pass them on" in err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as archive:
        found = {entry.name.removeprefix("bundle/"): archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
    everything = file.read_bytes().decode("latin-1") + "\n".join(found.values())
    for place, word in WORDS.items():
        assert word not in everything, place
        assert base64.b64encode(word.encode()).decode() not in everything, place
    assert {"queue.yaml", "events.yaml", "doctor.yaml", "nodes.yaml", "users.yaml", "about.yaml"} <= set(found)
    assert {"objects/StatefulSet-q-storage.yaml", "objects/ConfigMap-q-config.yaml", "pods/q-storage-1.yaml"} <= set(
        found
    )
    assert any(name.startswith("operator/tq-operator-") for name in found)
    assert "login REDACTED REDACTED REDACTED api_key: REDACTED" in found["pods/q-storage-1.yaml"]
    assert "50060" in found["objects/ConfigMap-q-config.yaml"]
    assert "pods/q-storage-1.metrics" in yaml.safe_load(found["about.yaml"])["unread"]
    assert "name another file with --file" in tq("support-bundle", "q", "--file", str(file), code=2)[1]


def test_kubectl_finds_the_plugin_and_completes_it(cluster: ControlPlane, tmp_path: Path, tq: Command) -> None:
    for name, function in (("kubectl-tq", "main"), ("kubectl_complete-tq", "complete")):
        script = f"#!{sys.executable}\nimport sys\nfrom tq_operator.kubectl import {function}\nsys.exit({function}())\n"
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'operator'}",
        "KUBECONFIG": str(cluster.kubeconfig),
    }

    def kubectl(*words: str) -> str:
        command = [cluster.binaries / "kubectl", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "q-storage-1" in kubectl("tq", "status", "-n", NAMESPACE)
    assert kubectl("__complete", "tq", "sup").splitlines()[0].startswith("support-bundle\t")
    assert kubectl("__complete", "tq", "status", "-n", NAMESPACE, "").splitlines()[0] == "q"
