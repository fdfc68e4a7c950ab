"""A queue's life against a real apiserver: created, at rest, changed by hand, scaled, refused, deleted."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import Operator, environment, write_certificate
from tests.integration.operator.control_plane import ControlPlane, free_port
from tests.unit.config.test_resource import REFUSALS
from tests.waiting import wait_until
from transfer_queue.config import resource

pytestmark = pytest.mark.timeout(1200)  # the first run builds Kubernetes

KINDS = "deployments,statefulsets,services,configmaps,poddisruptionbudgets,networkpolicies"
EXAMPLE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec:
  backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}
  access: {namespaces: [jobs]}
"""


def children(plane: ControlPlane, name: str) -> dict[str, dict[str, Any]]:
    done = plane.kubectl("get", KINDS, "-l", f"transferqueue.io/queue={name}", "-o", "json", "--show-managed-fields")
    assert done.returncode == 0, done.stderr
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in json.loads(done.stdout)["items"]}


def condition(plane: ControlPlane, name: str, kind: str) -> dict[str, Any]:
    status = (plane.get("transferqueue", name) or {}).get("status", {})
    return next((entry for entry in status.get("conditions", []) if entry["type"] == kind), {})


def served(plane: ControlPlane, resources: str, verbs: str) -> int:
    """Requests that the apiserver answered so far."""
    pattern = rf'^apiserver_request_total{{.*resource="({resources})".*verb="({verbs})".*}} (\d+)$'
    return sum(int(found[3]) for found in re.finditer(pattern, plane.request("GET", "/metrics"), re.MULTILINE))


@pytest.fixture
def queue(operator: Operator, request: pytest.FixtureRequest) -> Any:
    """Name of a queue of the test's own, whose children exist."""
    name = re.sub(r"[^a-z]+", "-", request.node.name.removeprefix("test_"))[:30].strip("-")
    operator.plane.apply(EXAMPLE.replace("NAME", name))
    wait_until(lambda: condition(operator.plane, name, "Ready"), "the queue has a status")
    yield name
    operator.plane.kubectl("delete", "transferqueue", name, "--wait=false")


def test_applying_a_queue_makes_its_children_with_owner_references(operator: Operator, queue: str) -> None:
    plane, made = operator.plane, children(operator.plane, queue)
    assert sorted(made) == [
        f"ConfigMap/{queue}-config",
        f"Deployment/{queue}-controller",
        f"PodDisruptionBudget/{queue}-controller",
        f"PodDisruptionBudget/{queue}-storage",
        f"Service/{queue}-controller",
        f"Service/{queue}-mooncake-master",
        f"Service/{queue}-storage",
        f"StatefulSet/{queue}-mooncake-master",
        f"StatefulSet/{queue}-storage",
    ]
    uid = (plane.get("transferqueue", queue) or {})["metadata"]["uid"]
    for item in made.values():
        assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [uid]
        managers = {entry["manager"] for entry in item["metadata"]["managedFields"] if entry["operation"] == "Apply"}
        assert managers == {"transferqueue-operator"}


def test_the_status_says_what_is_missing(operator: Operator, queue: str) -> None:
    ready = condition(operator.plane, queue, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PodsNotReady")
    columns = operator.plane.kubectl("get", "tq", queue).stdout.split("\n")
    assert columns[0].split() == ["NAME", "BACKEND", "READY", "STORAGE", "USED", "INJECTED", "AGE"]
    assert columns[1].split()[:4] == [queue, "mooncake", "False", "0/2"]


def test_a_queue_at_rest_is_read_but_not_written(operator: Operator, queue: str) -> None:
    plane, writes = operator.plane, "APPLY|PATCH|POST|PUT|DELETE"
    resources = "transferqueues|transferqueuebindings|deployments|statefulsets|services|configmaps|poddisruptionbudgets"

    def versions() -> dict[str, str]:
        queues = json.loads(plane.kubectl("get", "tq", "-A", "-o", "json").stdout)["items"]
        items = [*children(plane, queue).values(), *queues]
        return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in items}

    def quiet() -> bool:  # Kubernetes' own controllers have finished with the new objects
        before, written, seen = versions(), served(plane, resources, writes), served(plane, "transferqueues", "LIST")
        wait_until(lambda: served(plane, "transferqueues", "LIST") > seen + 1, "two looks at the queue", pause_s=0.2)
        return versions() == before and served(plane, resources, writes) == written

    wait_until(quiet, "the new objects are at rest")
    before, written, listed = versions(), served(plane, resources, writes), served(plane, "transferqueues", "LIST")
    wait_until(lambda: served(plane, "transferqueues", "LIST") >= listed + 6, "several looks at the queue", pause_s=0.2)
    assert versions() == before
    own = operator.log.read_text().count("applied")
    assert served(plane, resources, writes) - written == 0, f"{own} applied in all"


def test_a_deleted_child_comes_back(operator: Operator, queue: str) -> None:
    plane = operator.plane
    for kind in ("service", "statefulset"):
        old = (plane.get(kind, f"{queue}-storage") or {})["metadata"]["uid"]
        plane.kubectl("delete", kind, f"{queue}-storage")

        def replaced(kind: str = kind, old: str = old) -> bool:
            found = plane.get(kind, f"{queue}-storage")
            return bool(found and found["metadata"]["uid"] != old)

        wait_until(replaced, f"the {kind} is back")


def test_a_change_by_hand_is_taken_back(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-controller"
    image = '{"spec":{"template":{"spec":{"containers":[{"name":"controller","image":"foreign:1"}]}}}}'
    assert plane.kubectl("patch", "deployment", name, "-p", image).returncode == 0

    def repaired() -> bool:
        found = plane.get("deployment", name) or {}
        return bool(found["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/server:1")

    wait_until(repaired, "the image is the queue's again")


SHARDED = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: sharded, namespace: default}
spec: {backend: {simple: {}}, controller: {shards: COUNT, durability: process}, security: {networkPolicy: true}}
"""


def test_shards_are_containers_of_one_pod_behind_one_service(operator: Operator) -> None:
    plane = operator.plane

    def containers() -> list[str]:
        found = plane.get("deployment", "sharded-controller") or {"spec": {"template": {"spec": {"containers": []}}}}
        return [each["name"] for each in found["spec"]["template"]["spec"]["containers"]]

    try:
        for count, names in (
            (3, ["controller-0", "controller-1", "controller-2"]),
            (2, ["controller-0", "controller-1"]),
            (1, ["controller"]),
        ):
            plane.apply(SHARDED.replace("COUNT", str(count)))
            wait_until(lambda names=names: containers() == names, f"{count} shards")  # type: ignore[misc]
            addresses = ",".join(f"sharded-controller.default.svc:{50060 + shard}" for shard in range(count))

            def told(addresses: str = addresses) -> bool:
                status = (plane.get("transferqueue", "sharded") or {}).get("status", {})
                return bool(status.get("endpoints", {}).get("controller") == addresses)

            wait_until(told, "the status names all addresses")
            service = (plane.get("service", "sharded-controller") or {})["spec"]
            ports = {port["port"] for port in service["ports"]}
            assert ports == {first + shard for first in (50060, 9060) for shard in range(count)}
            assert service.get("publishNotReadyAddresses", False) == (count > 1)
            assert condition(plane, "sharded", "Degraded")["status"] == "False"
    finally:
        plane.kubectl("delete", "transferqueue", "sharded", "--wait=false")


def test_the_scale_subresource_scales_the_storage(operator: Operator, queue: str) -> None:
    plane = operator.plane
    assert plane.kubectl("scale", "transferqueue", queue, "--replicas=3").returncode == 0
    wait_until(
        lambda: (plane.get("statefulset", f"{queue}-storage") or {})["spec"]["replicas"] == 3, "three storage units"
    )
    wait_until(
        lambda: (plane.get("transferqueue", queue) or {})["status"]["storage"]["summary"] == "0/3", "the status says so"
    )


def test_an_object_of_somebody_else_is_never_taken_over(operator: Operator) -> None:
    plane, name = operator.plane, "conflict"
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-config"}, "data": {"a": "b"}}
    plane.apply(yaml.safe_dump(foreign))
    plane.apply(EXAMPLE.replace("NAME", name))
    wait_until(lambda: condition(plane, name, "Degraded").get("reason") == "NameConflict", "the conflict is reported")
    assert (plane.get("configmap", f"{name}-config") or {})["data"] == {"a": "b"}
    assert plane.get("statefulset", f"{name}-storage"), "the other children are made all the same"
    plane.kubectl("delete", "configmap", f"{name}-config")
    wait_until(lambda: condition(plane, name, "Degraded").get("status") == "False", "the conflict is over")
    plane.kubectl("delete", "transferqueue", name)


def test_deleting_a_queue_deletes_its_children_and_leaves_no_finalizer(operator: Operator, queue: str) -> None:
    plane = operator.plane
    assert "finalizers" not in (plane.get("transferqueue", queue) or {})["metadata"]
    plane.kubectl("delete", "transferqueue", queue)
    wait_until(lambda: not children(plane, queue), "the children are gone", 60, pause_s=0.2)


def given_boolean(spec: str) -> bool:
    return "replicas: true" in spec


@pytest.mark.parametrize(("spec", "message"), REFUSALS)
def test_the_apiserver_refuses_with_the_words_of_the_library(plane: ControlPlane, spec: str, message: str) -> None:
    head = "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: refused}\n"
    done = plane.kubectl("apply", "-f", "-", stdin=f"{head}spec: {spec}\n")
    assert done.returncode != 0
    if message.startswith("unknown field"):  # the apiserver does not list what is allowed
        assert message.split(";")[0] in done.stderr
        return
    path, _, words = message.partition(": ")
    # In between, the apiserver says "Invalid value" and the value in a form of its own.
    words = re.sub(r'^(?:"[^"]*"|-?[0-9]+|true|false) (?=must|is out)', "", words)
    words = re.sub(r'^Invalid value: "[^"]*": ', "", words).split("; quote it")[0]
    words = words.removesuffix("eger") if given_boolean(spec) else words  # it says int64 then
    assert path in done.stderr
    assert words in done.stderr


def test_the_smallest_queue_is_stored_with_the_defaults_of_the_library(plane: ControlPlane) -> None:
    head = "apiVersion: transferqueue.io/v1alpha1\nkind: TransferQueue\nmetadata: {name: smallest}\n"
    text = f"{head}spec: {{backend: {{mooncake: {{}}}}}}\n"
    assert plane.kubectl("apply", "-f", "-", stdin=text).returncode == 0
    try:
        assert resource.parse(plane.get("transferqueue", "smallest")).spec == resource.load(text).spec
    finally:
        plane.kubectl("delete", "transferqueue", "smallest")


JOBS = ("jobs", "default")


def deployment(name: str, label: str) -> str:
    template = {
        "metadata": {"labels": {"app": name, "transferqueue.io/inject": label}},
        "spec": {"containers": [{"name": "trainer", "image": "t:1", "env": [{"name": "LOCAL_IP", "value": "own"}]}]},
    }
    spec = {"selector": {"matchLabels": {"app": name}}, "template": template}
    return yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec})


@pytest.mark.parametrize("namespace", JOBS)
def test_the_pods_of_a_labelled_deployment_are_injected(operator: Operator, queue: str, namespace: str) -> None:
    plane = operator.plane
    plane.kubectl("create", "namespace", namespace)
    wait_until(lambda: plane.get("serviceaccount", "default", namespace), "the namespace is set up")
    label = queue if namespace == "default" else f"default_{queue}"
    done = plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=deployment("trainer", label))
    assert done.returncode == 0, done.stderr

    def pods() -> Any:
        return plane.request("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector=app=trainer")["items"]

    (pod,) = wait_until(pods, "the pod exists")
    variables = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert variables["LOCAL_IP"] == "own"
    assert variables["TQ_CONFIG_FILE"] == "/etc/transferqueue/attach.yaml"
    assert f"{queue}-controller.default.svc:50060" in pod["metadata"]["annotations"]["transferqueue.io/attach"]
    wait_until(lambda: (plane.get("transferqueue", queue) or {})["status"]["injected"] == 1, "the pod is counted")
    plane.kubectl("delete", "deployment", "trainer", "-n", namespace)


def run_pod(plane: ControlPlane, label: str, namespace: str = "default") -> subprocess.CompletedProcess[str]:
    overrides = json.dumps({"metadata": {"labels": {"transferqueue.io/inject": label}}})
    return plane.kubectl("run", "p", "--image=t:1", f"--overrides={overrides}", "--dry-run=server", "-n", namespace)


def test_a_pod_that_asks_for_a_queue_that_does_not_exist_is_refused(operator: Operator) -> None:
    done = run_pod(operator.plane, "nowhere")
    assert "TransferQueue default/nowhere does not exist; create it before pods that use it" in done.stderr


def test_pods_in_the_namespace_of_the_operator_are_never_looked_at(operator: Operator) -> None:
    plane = operator.plane
    wait_until(lambda: plane.get("serviceaccount", "default", "tq-system"), "the namespace is set up")
    for namespace in ("tq-system", "kube-system"):
        assert run_pod(plane, "nowhere", namespace).returncode == 0


def test_a_new_certificate_is_taken_up_without_a_refused_pod(
    operator: Operator, queue: str, certificates: Path
) -> None:
    write_certificate(operator.plane, certificates, "renewed")

    def admitted_and_renewed() -> bool:
        done = run_pod(operator.plane, queue)
        assert done.returncode == 0, done.stderr
        return "took up a new certificate" in operator.log.read_text()

    wait_until(admitted_and_renewed, "the new certificate is in use")
    assert run_pod(operator.plane, queue).returncode == 0


def test_the_operator_needs_no_more_rights_than_the_chart_gives(operator: Operator, queue: str) -> None:
    refused = [line for line in operator.log.read_text().lower().splitlines() if "forbidden" in line]
    # Nobody may make anything in a namespace that another test has just deleted.
    assert [line for line in refused if "because it is being terminated" not in line] == []


def test_the_operator_ends_on_a_signal_and_says_in_one_line_why_it_cannot_start(
    plane: ControlPlane, certificates: Path, tmp_path: Path
) -> None:
    variables = environment(plane, certificates, free_port(), free_port(), TQ_WEBHOOK_CERTIFICATES=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tq_operator"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: no certificate for the webhook: ")
    variables["TQ_WEBHOOK_CERTIFICATES"] = str(certificates)
    with subprocess.Popen([sys.executable, "-m", "tq_operator"], env=variables, stderr=subprocess.DEVNULL) as child:
        running = Operator(plane, child, int(variables["TQ_HEALTH_PORT"]), tmp_path / "none")
        wait_until(running.ready, "a second operator is ready")
        context = ssl.create_default_context(cafile=plane.authority.files.certificate)
        kept = http.client.HTTPSConnection("127.0.0.1", int(variables["TQ_WEBHOOK_PORT"]), context=context, timeout=30)

        def let_go() -> bool:
            kept.request("POST", "/validate", "{}")  # no review, which is answered all the same
            answer = kept.getresponse()
            answer.read()
            return answer.headers.get("Connection") == "close"

        assert not let_go()
        child.terminate()
        wait_until(let_go, "the kept connection is closed by an answer")
        assert child.wait(30) == 0


@pytest.mark.parametrize(("limit", "what"), [("count/statefulsets.apps", "StatefulSet"), ("pods", "Pod")])
def test_an_exceeded_quota_is_told_about(operator: Operator, limit: str, what: str) -> None:
    plane, namespace = operator.plane, f"quota-{what.lower()}"
    plane.kubectl("create", "namespace", namespace)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": namespace}}
    plane.apply(yaml.safe_dump({**quota, "spec": {"hard": {limit: "0"}}}))
    wait_until(lambda: (plane.get("resourcequota", "none", namespace) or {}).get("status"), "the quota is counted")
    plane.apply(EXAMPLE.replace("NAME", "q").replace("namespace: default", f"namespace: {namespace}"))

    def reported() -> Any:
        found = (plane.get("transferqueue", "q", namespace) or {}).get("status", {}).get("conditions", [])
        return [entry for entry in found if entry["reason"] == "QuotaExceeded" and entry["type"] == "Degraded"]

    (degraded,) = wait_until(reported, "the quota is in the condition", 60)
    assert "raise the ResourceQuota of the namespace" in degraded["message"]
    plane.kubectl("delete", "transferqueue", "q", "-n", namespace)


BINDING = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueueBinding
metadata: {name: NAME, namespace: NAMESPACE}
spec:
  queue: {name: NAME, namespace: default}
  selector: {matchLabels: {app: verl}}
"""


@pytest.mark.parametrize(("namespace", "reason"), [("jobs", "Bound"), ("strangers", "NotAdmitted")])
def test_a_binding_gives_the_queue_to_pods_of_an_admitted_namespace(
    operator: Operator, queue: str, namespace: str, reason: str
) -> None:
    plane = operator.plane
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("label", "namespace", namespace, "transferqueue.io/bindings=", "--overwrite")
    wait_until(lambda: plane.get("serviceaccount", "default", namespace), "the namespace is set up")
    plane.apply(BINDING.replace("NAMESPACE", namespace).replace("NAME", queue))

    def state() -> Any:
        found = (plane.get("tqb", queue, namespace) or {}).get("status", {}).get("conditions", [])
        return [entry["reason"] for entry in found]

    wait_until(lambda: state() == [reason], "the binding says whether it holds")

    def run(app: str) -> subprocess.CompletedProcess[str]:
        overrides = json.dumps({"metadata": {"labels": {"app": app}}})
        words = ("run", "p", "--image=t:1", f"--overrides={overrides}", "--dry-run=server", "-n", namespace)
        return plane.kubectl(*words, "-o", "json")

    def looked_at() -> subprocess.CompletedProcess[str] | None:
        done = run("verl")
        return done if "transferqueue.io/injected" in done.stdout or done.returncode else None

    # The apiserver takes up the label of the namespace after a moment.
    done = wait_until(looked_at, "pods are looked at", pause_s=0.2)
    if reason == "Bound":
        injected = json.loads(done.stdout)["metadata"]["annotations"]["transferqueue.io/injected"]
        assert injected == f"default/{queue}"
    else:
        assert "does not admit pods of namespace strangers" in done.stderr
    assert "transferqueue.io/injected" not in run("other").stdout
    plane.kubectl("delete", "tqb", queue, "-n", namespace)


def test_a_pod_that_was_missed_is_found_and_told_about(operator: Operator) -> None:
    plane = operator.plane
    wait_until(lambda: plane.get("serviceaccount", "default", "tq-system"), "the namespace is set up")
    # The webhook never looks at this namespace, as it would not while no operator runs.
    overrides = json.dumps({"metadata": {"labels": {"transferqueue.io/inject": "q"}}})
    done = plane.kubectl("run", "missed", "--image=t:1", f"--overrides={overrides}", "-n", "tq-system")
    assert done.returncode == 0, done.stderr

    def told() -> Any:
        found = plane.request("GET", "/apis/events.k8s.io/v1/namespaces/tq-system/events")["items"]
        return [item["note"] for item in found if item["reason"] == "NotInjected"]

    (note,) = wait_until(told, "the pod is told about")
    assert "delete it, and its owner creates it again" in note
    plane.kubectl("delete", "pod", "missed", "-n", "tq-system", "--force")


def test_one_master_gives_way_to_several_and_the_etcd_of_them(operator: Operator, queue: str) -> None:
    plane, one, several = operator.plane, f"{queue}-mooncake-master", f"{queue}-mooncake-masters"
    wait_until(lambda: plane.get("statefulset", one), "the one master exists")
    group = {"highAvailability": {"masters": 3, "etcd": {"development": {}}}}
    change = json.dumps({"spec": {"backend": {"mooncake": group}}})
    done = plane.kubectl("patch", "transferqueue", queue, "--type=merge", "-p", change)
    assert done.returncode == 0, done.stderr
    made = wait_until(lambda: plane.get("statefulset", several), "the masters exist")
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--etcd_endpoints={queue}-etcd.default.svc:2379" in command
    assert (plane.get("statefulset", f"{queue}-etcd") or {})["spec"]["replicas"] == 1
    wait_until(lambda: plane.get("statefulset", one) is None, "the one master is gone")

    def told() -> bool:
        message = condition(plane, queue, "Ready").get("message", "")
        return "mooncake-masters 0/3" in message and "etcd 0/1" in message

    wait_until(told, "the status counts them")
    endpoints = (plane.get("transferqueue", queue) or {})["status"]["endpoints"]
    assert endpoints["mooncakeMaster"] == f"etcd://{queue}-etcd.default.svc:2379"


DEVICES = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: rdma.example.com}
spec: {selectors: [{cel: {expression: "device.driver == 'rdma.example.com'"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: rdma}
spec:
  driver: rdma.example.com
  allNodes: true
  pool: {name: rdma, generation: 1, resourceSliceCount: 1}
  devices: [{name: nic-0}]
"""
CLAIM = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec:
  backend: {mooncake: {globalSegmentSize: 256Mi}}
  access: {namespaces: [jobs]}
  rdma: {claim: {deviceClassName: rdma.example.com, gpuDeviceClassName: gpu.example.com}}
  storage: {replicas: 0}  # there is no kubelet: pods of a new template never get ready, and keep the old one
"""


def test_a_queue_with_a_claim_gets_its_devices_from_templates(operator: Operator) -> None:
    plane, writes, known = operator.plane, "APPLY|PATCH|POST|PUT|DELETE", len(operator.log.read_text())

    def templates(name: str) -> dict[str, dict[str, Any]]:
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
        items = plane.request("GET", f"{path}?labelSelector=transferqueue.io/queue={name}")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def storage_template(name: str) -> str:
        pod = (plane.get("statefulset", f"{name}-storage") or {})["spec"]["template"]["spec"]
        assert pod["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]
        (claim,) = pod["resourceClaims"]
        return str(claim["resourceClaimTemplateName"])

    def run(label: str, namespace: str) -> subprocess.CompletedProcess[str]:
        overrides = json.dumps({"metadata": {"labels": {"transferqueue.io/inject": label}}})
        words = ("--image=t:1", f"--overrides={overrides}", "--dry-run=server", "-o", "json")
        return plane.kubectl("run", "p", *words, "-n", namespace)

    plane.apply(CLAIM.replace("NAME", "early"))
    missing = wait_until(lambda: condition(plane, "early", "RdmaAvailable"), "the queue is taken up")
    assert (missing["status"], missing["reason"]) == ("False", "FellBackToTcp")
    assert "DeviceClass rdma.example.com does not exist" in missing["message"]
    assert templates("early") == {}
    plane.apply(DEVICES)
    plane.apply(CLAIM.replace("NAME", "claiming"))
    offered = wait_until(lambda: condition(plane, "claiming", "RdmaAvailable"), "the queue is taken up")
    assert (offered["status"], offered["reason"]) == ("True", "DevicesOffered")
    made = templates("claiming")
    own = storage_template("claiming")
    (other,) = made.keys() - {own}
    assert other.startswith("claiming-rdma-gpu-")
    uid = (plane.get("transferqueue", "claiming") or {})["metadata"]["uid"]
    assert all(item["metadata"]["ownerReferences"][0]["uid"] == uid for item in made.values())

    done = run("claiming", "default")
    assert done.returncode == 0, done.stderr
    pod = json.loads(done.stdout)["spec"]
    assert pod["resourceClaims"] == [{"name": "rdma", "resourceClaimTemplateName": other}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]
    plane.kubectl("create", "namespace", "jobs")
    wait_until(lambda: plane.get("serviceaccount", "default", "jobs"), "the namespace is set up")
    assert "make a ResourceClaimTemplate in jobs" in run("default_claiming", "jobs").stderr

    def state() -> tuple[Any, ...]:
        versions = {name: item["metadata"]["resourceVersion"] for name, item in templates("claiming").items()}
        applied = len(re.findall(r"applied \w+ default/claiming-", operator.log.read_text()))
        return versions, applied, served(plane, "resourceclaimtemplates", writes)

    before, listed = state(), served(plane, "transferqueues", "LIST")
    wait_until(lambda: served(plane, "transferqueues", "LIST") >= listed + 6, "several looks at the queue", pause_s=0.2)
    assert state() == before

    change = json.dumps(
        {"spec": {"rdma": {"claim": {"deviceClassName": "other.example.com", "gpuDeviceClassName": None}}}}
    )
    plane.apply(DEVICES.partition("---")[0].replace("{name: rdma.example.com}", "{name: other.example.com}"))
    done = plane.kubectl("patch", "transferqueue", "claiming", "--type=merge", "-p", change)
    assert done.returncode == 0, done.stderr
    (last,) = wait_until(
        lambda: (found := templates("claiming")) and not found.keys() & made.keys() and found, "it is new"
    )
    assert storage_template("claiming") == last
    for name in ("early", "claiming"):
        plane.kubectl("delete", "transferqueue", name)
    plane.kubectl("delete", "deviceclass", "rdma.example.com", "other.example.com")
    plane.kubectl("delete", "resourceslice", "rdma")
    assert "forbidden" not in operator.log.read_text()[known:].lower()


def test_a_horizontal_pod_autoscaler_scales_the_storage(operator: Operator, queue: str) -> None:
    plane = operator.plane
    target = {"apiVersion": "transferqueue.io/v1alpha1", "kind": "TransferQueue", "name": queue}
    usage = {"name": "memory", "target": {"type": "Utilization", "averageUtilization": 80}}
    metrics = [{"type": "Resource", "resource": usage}]
    head = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": queue}}
    # Below the least number no metrics are asked for, which nothing serves here.
    spec = {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5, "metrics": metrics}
    plane.apply(yaml.safe_dump({**head, "spec": spec}))
    scaled = {"replicas": 3, "summary": "0/3"}

    def storage() -> dict[str, Any]:
        found = (plane.get("transferqueue", queue) or {})["status"]["storage"]
        return {name: found[name] for name in scaled}

    wait_until(lambda: storage() == scaled, "the autoscaler scales the storage units", 60)
    plane.kubectl("delete", "hpa", queue)


def patch(plane: ControlPlane, kind: str, name: str, *operations: str) -> None:
    """JSON patch operations as ``op path value`` in JSON."""
    listed = [dict(zip(("op", "path", "value"), json.loads(each), strict=False)) for each in operations]
    done = plane.kubectl("patch", kind, name, "--type=json", "-p", json.dumps(listed))
    assert done.returncode == 0, done.stderr


def told(plane: ControlPlane, reason: str) -> list[str]:
    events = json.loads(plane.kubectl("get", "events.events.k8s.io", "-o", "json").stdout)["items"]
    return [event["note"] for event in events if event["reason"] == reason]


def test_what_others_change_in_a_service_is_taken_back_with_an_event(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-controller"
    wait_until(lambda: plane.get("service", name) is not None, "the Service is there")

    def spec() -> dict[str, Any]:
        found: dict[str, Any] = (plane.get("service", name) or {})["spec"]
        return found

    before = spec()
    plane.kubectl("patch", "service", name, "--type=merge", "-p", '{"spec":{"selector":{"foreign":"yes"}}}')
    wait_until(lambda: spec() == before, "the selector is as before")
    patch(plane, "service", name, '["replace", "/spec/ports/0/port", 1234]', '["add", "/spec/type", "NodePort"]')
    wait_until(lambda: spec() == before, "ports and type are as before")
    patch(plane, "service", name, '["remove", "/metadata/ownerReferences"]')
    wait_until(lambda: (plane.get("service", name) or {})["metadata"].get("ownerReferences"), "it is owned again")
    found = told(plane, "DriftRepaired")
    assert any(f"Service {name}: took back spec.selector" in note for note in found), found
    assert any(f"Service {name}: took back " in note and "spec.ports.1234/TCP" in note for note in found), found
    assert len(found) == len(set(found)), "each repair is told once"
    assert any(f"Service {name}" in note for note in told(plane, "Adopted"))
    assert condition(plane, queue, "Degraded")["status"] == "False"


def test_a_port_that_was_changed_by_nobody_known_is_set_back_and_told(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-controller"
    wait_until(lambda: plane.get("service", name) is not None, "the Service is there")
    made = plane.get("service", name) or {}
    before = made["spec"]["ports"]
    clear = '["replace", "/metadata/managedFields", [{}]]'
    patch(plane, "service", name, '["replace", "/spec/ports/0/protocol", "UDP"]', clear)
    wait_until(
        lambda: (plane.get("service", name) or {"spec": {"ports": 0}})["spec"]["ports"] == before, "it is as before"
    )
    wait_until(lambda: condition(plane, queue, "Degraded")["status"] == "False", "nothing is refused")
    assert (plane.get("service", name) or {"metadata": {}})["metadata"].get("uid") == made["metadata"]["uid"]
    wait_until(
        lambda: any(f"Service {name}: its managedFields were cleared" in note for note in told(plane, "DriftRepaired")),
        "an event tells of it",
    )


def test_a_spec_with_an_invalid_child_leaves_the_one_that_runs(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-controller"
    wait_until(lambda: plane.get("deployment", name) is not None, "the Deployment is there")
    before = (plane.get("deployment", name) or {})["metadata"]["uid"]
    ports = '[{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]'
    sidecar = f'[{{"name": "side", "image": "any", "ports": {ports}}}]'
    change = f'{{"spec": {{"podTemplate": {{"spec": {{"containers": {sidecar}}}}}}}}}'
    plane.kubectl("patch", "transferqueue", queue, "--type=merge", "-p", change)
    wait_until(lambda: "Duplicate" in condition(plane, queue, "Degraded").get("message", ""), "the change is refused")
    assert (plane.get("deployment", name) or {"metadata": {}})["metadata"].get("uid") == before


def test_a_change_by_hand_and_one_of_the_spec_at_once_end_with_what_the_queue_wants(
    operator: Operator, queue: str
) -> None:
    plane, name = operator.plane, f"{queue}-controller"
    wait_until(lambda: plane.get("service", name) is not None, "the Service is there")
    plane.kubectl("annotate", "transferqueue", queue, "transferqueue.io/pause=true")
    wait_until(lambda: condition(plane, queue, "Progressing").get("reason") == "Held", "nothing is written")
    patch(plane, "service", name, '["replace", "/spec/ports/0/port", 1234]')
    plane.kubectl("patch", "transferqueue", queue, "--type=merge", "-p", '{"spec":{"controller":{"port":50111}}}')
    plane.kubectl("annotate", "transferqueue", queue, "transferqueue.io/pause-")

    def ports() -> set[int]:
        return {port["port"] for port in (plane.get("service", name) or {})["spec"]["ports"]}

    wait_until(lambda: 50111 in ports() and 1234 not in ports(), "the port is that of the spec")
    wait_until(lambda: condition(plane, queue, "Degraded").get("status") == "False", "nothing is refused")


def test_what_others_add_to_pod_templates_is_taken_back(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-storage"
    wait_until(lambda: plane.get("statefulset", name) is not None, "the StatefulSet is there")

    def spec() -> dict[str, Any]:
        found: dict[str, Any] = (plane.get("statefulset", name) or {})["spec"]
        return found

    before, container = spec(), "/spec/template/spec/containers/0"
    patch(
        plane,
        "statefulset",
        name,
        '["add", "/spec/template/spec/hostNetwork", true]',
        f'["add", "{container}/env/0", {{"name": "FOREIGN", "value": "1"}}]',
        f'["replace", "{container}/name", "other"]',
        '["add", "/spec/minReadySeconds", 100]',
    )
    wait_until(lambda: spec() == before, "all of it is as before")
    template = {"template": {"spec": {"serviceAccountName": "other"}}}
    applied = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": template}
    done = plane.kubectl(*("apply", "--server-side", "--field-manager=foreign", "-f", "-"), stdin=json.dumps(applied))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: spec() == before, "the account and its older name are gone")
    patch(plane, "configmap", f"{queue}-config", '["add", "/immutable", true]')
    wait_until(lambda: "immutable" not in (plane.get("configmap", f"{queue}-config") or {"immutable": 1}), "made again")
    assert any(f"ConfigMap {queue}-config" in note for note in told(plane, "Recreated"))
