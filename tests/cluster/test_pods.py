"""The cluster behaves as Kubernetes does: pods, Services, DNS, exec, logs, webhooks, on both nodes."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, environment
from tests.cluster.component import wait_until
from tests.cluster.errors import ClusterError
from tests.cluster.images import base_image
from tests.cluster.node import Node
from tests.cluster.paths import state_folder
from tests.cluster.pki import Authority

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAMESPACE = "test-pods"
PORT = 8000

# Answers every GET with the pod's own name, which is its host name.
WEB_SERVER = f"""
import http.server, socket
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(socket.gethostname().encode())
print("listening", flush=True)
http.server.ThreadingHTTPServer(("", {PORT}), Answer).serve_forever()
"""

# A mutating webhook that labels every pod, with the certificate in /certificate.
WEBHOOK_SERVER = f"""
import base64, http.server, json, ssl
patch = base64.b64encode(json.dumps([dict(op="add", path="/metadata/labels/seen", value="yes")]).encode()).decode()
class Review(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        uid = json.loads(self.rfile.read(int(self.headers["content-length"])))["request"]["uid"]
        response = dict(uid=uid, allowed=True, patchType="JSONPatch", patch=patch)
        review = dict(apiVersion="admission.k8s.io/v1", kind="AdmissionReview", response=response)
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(review).encode())
server = http.server.ThreadingHTTPServer(("", {PORT}), Review)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/certificate/tls.crt", "/certificate/tls.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"


def pod(name: str, node: str, code: str, image: str, **spec: Any) -> dict[str, Any]:
    """A pod that runs Python `code` on `node` and is ready when PORT answers."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", code],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": spec.pop("volumeMounts", []),
    }
    fixed = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"pod": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**fixed, **spec}}


def service(name: str, selected: str) -> dict[str, Any]:
    """A Service on port 80 (443 for TLS clients) in front of the pod named `selected`."""
    ports = [{"name": "web", "port": 80, "targetPort": PORT}, {"name": "tls", "port": 443, "targetPort": PORT}]
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"selector": {"pod": selected}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    """Create or update `objects`."""
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> str:
    """A loaded image with python3 in it."""
    return cluster.load(base_image())[0]


@pytest.fixture(scope="module")
def web(cluster: Cluster, image: str) -> Iterator[Cluster]:
    """The cluster with a web server on each node, web-NODE, behind a Service to-web-NODE."""
    apply(cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    try:
        for node in cluster.nodes:
            name = f"web-{node.name}"
            apply(cluster, pod(name, node.name, WEB_SERVER, image), service(f"to-{name}", name))
        cluster.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod", "--all", "--timeout=120s")
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")


def fetch(cluster: Cluster, source: str, url: str) -> str:
    """What a GET of `url` from pod `source` answers."""
    return cluster.kubectl("exec", "-n", NAMESPACE, source, "--", "python3", "-c", FETCH, url).strip()


def answers(cluster: Cluster, source: str, url: str) -> bool:
    """Whether a GET of `url` from pod `source` is answered."""
    try:
        fetch(cluster, source, url)
    except ClusterError:
        return False
    return True


def test_both_nodes_are_ready_at_addresses_of_their_own(cluster: Cluster) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    ready = {
        node["metadata"]["name"]: next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready")
        for node in nodes
    }
    assert ready == {"node1": "True", "node2": "True"}
    assert len({node["status"]["addresses"][0]["address"] for node in nodes}) == 2


def test_pods_run_on_both_nodes_from_a_loaded_image(web: Cluster) -> None:
    pods = json.loads(web.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    placed = {(each["spec"]["nodeName"], each["status"]["phase"]) for each in pods}
    assert placed == {("node1", "Running"), ("node2", "Running")}


@pytest.mark.parametrize(("source", "target"), [("web-node1", "web-node2"), ("web-node2", "web-node1")])
def test_a_pod_reaches_a_pod_on_the_other_node_by_address(web: Cluster, source: str, target: str) -> None:
    address = web.kubectl("get", "pod", "-n", NAMESPACE, target, "-o", "jsonpath={.status.podIP}")
    assert fetch(web, source, f"http://{address}:{PORT}") == target


@pytest.mark.parametrize("source", ["web-node1", "web-node2"])
@pytest.mark.parametrize("target", ["web-node1", "web-node2"])
def test_a_service_is_reached_by_name_from_every_node_itself_included(web: Cluster, source: str, target: str) -> None:
    # kube-proxy learns of a ready pod a moment after the API server.
    url = f"http://to-{target}"
    wait_until(lambda: answers(web, source, url), f"{source} reaches Service to-{target}", 30)
    assert fetch(web, source, url) == target
    assert fetch(web, source, f"{url}.{NAMESPACE}.svc.cluster.local") == target


def test_a_name_outside_the_cluster_fails_at_once_instead_of_being_asked_for(web: Cluster) -> None:
    with pytest.raises(ClusterError, match="Name or service not known"):
        fetch(web, "web-node1", "http://example.invalid")


def test_logs_of_a_pod_can_be_read(web: Cluster) -> None:
    assert web.kubectl("logs", "-n", NAMESPACE, "web-node2").startswith("listening")


def test_a_pod_reaches_the_api_server_with_its_service_account(web: Cluster) -> None:
    code = (
        "import ssl, urllib.request as u; at = '/var/run/secrets/kubernetes.io/serviceaccount/';"
        "head = {'Authorization': 'Bearer ' + open(at + 'token').read()};"
        "ask = u.Request('https://kubernetes.default.svc/version', headers=head);"
        "print(u.urlopen(ask, context=ssl.create_default_context(cafile=at + 'ca.crt')).read().decode())"
    )
    answer = web.kubectl("exec", "-n", NAMESPACE, "web-node2", "--", "python3", "-c", code)
    assert json.loads(answer)["gitVersion"] == "v1.36.3"


def test_a_memory_limit_is_kept(web: Cluster, image: str) -> None:
    hungry = pod("hungry", "node1", "x = b'x' * (256 << 20)", image, restartPolicy="Never")
    hungry["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi"}}
    apply(web, hungry)
    web.kubectl("wait", "-n", NAMESPACE, "pod/hungry", "--for=jsonpath={.status.phase}=Failed", "--timeout=60s")
    reason = "{.status.containerStatuses[0].state.terminated.reason}"
    assert web.kubectl("get", "pod", "-n", NAMESPACE, "hungry", "-o", f"jsonpath={reason}") == "OOMKilled"
    web.kubectl("delete", "pod", "-n", NAMESPACE, "hungry")


def test_the_api_server_calls_a_webhook_behind_a_service(web: Cluster, image: str, tmp_path: Any) -> None:
    host = f"hook.{NAMESPACE}.svc"
    authority = Authority(tmp_path)
    pair = authority.issue("hook", "hook", hosts=(host,))
    data = {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
    metadata = {"name": "hook", "namespace": NAMESPACE}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}
    volume = {"name": "certificate", "secret": {"secretName": "hook"}}
    mount = {"name": "certificate", "mountPath": "/certificate"}
    server = pod("hook", "node2", WEBHOOK_SERVER, image, volumes=[volume], volumeMounts=[mount])
    apply(web, secret, server, service("hook", "hook"))
    web.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod/hook", "--timeout=60s")
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    webhook = {
        "name": "hook.transferqueue.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
        "clientConfig": {
            "caBundle": base64.b64encode(authority.files.certificate.read_bytes()).decode(),
            "service": {"name": "hook", "namespace": NAMESPACE},
        },
    }
    kind = "MutatingWebhookConfiguration"
    apply(
        web,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": NAMESPACE},
            "webhooks": [webhook],
        },
    )
    try:
        probe = json.dumps(pod("probe", "node1", "", image))

        def labelled() -> bool:
            try:
                created = json.loads(web.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=probe))
            except ClusterError:  # the Service has no endpoint yet
                return False
            return bool(created["metadata"]["labels"].get("seen") == "yes")

        wait_until(labelled, "the API server calls the webhook", 30)
    finally:
        web.kubectl("delete", kind, NAMESPACE)


def test_env_gives_a_shell_whose_clients_reach_the_cluster(cluster: Cluster) -> None:
    code = (
        "from kubernetes import client, config; config.load_kube_config();"
        "print(len(client.CoreV1Api().list_node().items), 'nodes')"
    )
    script = f'{environment()}\nkubectl get nodes -o name\nhelm list --short\npython -c "{code}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "node/node1\nnode/node2\n2 nodes\n"


def test_the_api_server_is_reached_from_the_machine_over_verified_tls(cluster: Cluster) -> None:
    server = json.loads(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    context = ssl.create_default_context(cafile=str(state_folder() / "pki" / "ca.crt"))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with direct.open(f"{server}/version", timeout=20) as answer:
        assert json.load(answer)["gitVersion"] == "v1.36.3"


def test_an_image_on_the_nodes_is_not_loaded_again(
    cluster: Cluster, image: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cluster.load(base_image()) == [image]
    told = capfd.readouterr().err
    assert f"{image} is on node1 already" in told
    assert f"{image} is on node2 already" in told


def test_an_unknown_image_is_refused_naming_what_there_is(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"no image 'no-such-image'.*server"):
        cluster.load("no-such-image")


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_has_mounts_processes_and_a_network_of_its_own(cluster: Cluster, number: int) -> None:
    node: Node = cluster.nodes[number]
    assert node.run(["hostname"]).strip() == node.name
    assert node.host.address in node.run(["ip", "-brief", "address"])
    processes = node.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).split()
    assert processes.count("kubelet") == processes.count("containerd") == 1
    assert "kube-apiserver" not in processes
    other = cluster.nodes[1 - number]
    node.run(["touch", "/var/lib/kubelet/device-plugins/own.sock"])
    assert "own.sock" not in other.run(["ls", "/var/lib/kubelet/device-plugins"])
    node.run(["rm", "/var/lib/kubelet/device-plugins/own.sock"])
