"""Certificates of queues against a real apiserver: made, used by real servers, renewed, given to other namespaces."""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

from tests.integration.operator.conftest import Operator
from tests.integration.operator.test_operator import condition, deployment
from tests.integration.security.servers import running
from tests.waiting import wait_until
from tq_operator.runtime.certificates import CERTIFICATE_LIFE
from transfer_queue.launch.certificates import KeyPair, issue, server_names

pytestmark = pytest.mark.timeout(1200)

QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: NAME, namespace: default}
spec:
  backend: {simple: {}}
  access: {namespaces: [jobs]}
  security: SECURITY
"""


def secret(operator: Operator, name: str, namespace: str = "default") -> dict[str, bytes]:
    found = operator.plane.get("secret", name, namespace) or {}
    return {key: base64.b64decode(text) for key, text in found.get("data", {}).items()}


def apply(operator: Operator, name: str, security: str) -> None:
    operator.plane.apply(QUEUE.replace("NAME", name).replace("SECURITY", security))


@pytest.fixture(scope="module")
def queue(operator: Operator) -> Iterator[str]:
    name = "encrypted"
    apply(operator, name, "{tls: {mode: operator}}")
    wait_until(lambda: secret(operator, f"{name}-tls-client"), "the certificates are made")
    yield name
    operator.plane.kubectl("delete", "transferqueue", name, "--wait=false")


def files(folder: Path, data: dict[str, bytes], settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` of tls with the files of a Secret in ``folder``."""
    folder.mkdir()
    made = dict(settings)
    for field in ("ca", "certificate", "key"):
        path = folder / Path(settings[field]).name
        path.write_bytes(data[path.name])
        made[field] = str(path)
    return made


def test_servers_and_clients_use_what_the_operator_made(operator: Operator, queue: str, tmp_path: Path) -> None:
    config = (operator.plane.get("configmap", f"{queue}-config") or {})["data"]
    server, client = (
        files(tmp_path / role, secret(operator, f"{queue}-tls-{role}"), yaml.safe_load(config[file])["security"]["tls"])
        for role, file in (("server", "controller.yaml"), ("client", "attach.yaml"))
    )
    rows = TensorDict({"x": torch.arange(6).reshape(3, 2)}, batch_size=[3])
    with running(tmp_path, {"tls": server}) as servers, servers.client(tls=client) as program:
        program.put(rows, partition_id="p")
        meta = program.get_meta(["x"], 3, "p", task_name="t")
        assert torch.equal(torch.as_tensor(program.get_data(meta)["x"]), rows["x"])


def test_keys_are_in_secrets_alone_and_that_of_the_ca_is_in_no_pod(operator: Operator, queue: str) -> None:
    plane = operator.plane
    wait_until(lambda: plane.get("statefulset", f"{queue}-storage"), "the children are made")
    keys = [secret(operator, f"{queue}-tls-ca")["ca.key"]]
    keys += [secret(operator, f"{queue}-tls-{role}")["tls.key"] for role in ("server", "client")]
    shown = plane.kubectl("get", "tq,configmaps,deployments,statefulsets,events", "-A", "-o", "json").stdout
    for key in keys:
        assert key.startswith(b"-----BEGIN PRIVATE KEY")
        for form in (key.decode().splitlines()[1], base64.b64encode(key).decode()[60:120]):
            assert form not in shown + operator.log.read_text()
    assert f"{queue}-tls-server" in shown
    assert f"{queue}-tls-ca" not in shown
    (volume,) = [
        volume
        for volume in (plane.get("deployment", f"{queue}-controller") or {})["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tls"
    ]
    assert volume["secret"]["defaultMode"] & stat.S_IRWXO == 0


def test_a_certificate_is_renewed_by_the_same_ca_before_it_ends(operator: Operator, queue: str) -> None:
    plane, name = operator.plane, f"{queue}-tls-server"
    authority = secret(operator, f"{queue}-tls-ca")
    past = datetime.now(timezone.utc) - CERTIFICATE_LIFE * 0.8
    hosts = [f"{queue}-controller.default.svc", f"{queue}-controller", f"*.{queue}-storage.default.svc"]
    pair = KeyPair(authority["ca.crt"], authority["ca.key"])
    old = issue(pair, "transferqueue server", server_names(hosts), past, CERTIFICATE_LIFE, server=True)
    data = {"tls.crt": old.certificate, "tls.key": old.key}
    patch = {"data": {key: base64.b64encode(value).decode() for key, value in data.items()}}
    assert plane.kubectl("patch", "secret", name, "-p", json.dumps(patch)).returncode == 0
    wait_until(lambda: secret(operator, name)["tls.crt"] != old.certificate, "a new certificate is made")
    assert secret(operator, name)["ca.crt"] == authority["ca.crt"]
    assert secret(operator, f"{queue}-tls-ca") == authority


def test_pods_of_another_namespace_get_a_certificate_of_their_own_until_the_queue_is_deleted(
    operator: Operator,
) -> None:
    plane, name = operator.plane, "shared"
    apply(operator, name, "{tls: {mode: operator}}")
    wait_until(lambda: secret(operator, f"{name}-tls-client"), "the certificates are made")
    plane.kubectl("create", "namespace", "jobs")
    wait_until(lambda: plane.get("serviceaccount", "default", "jobs"), "the namespace is set up")
    plane.kubectl("create", "namespace", "intruders")
    wait_until(lambda: plane.get("serviceaccount", "default", "intruders"), "the namespace is set up")
    pod = {
        "labels": {"transferqueue.io/queue": name},
        "annotations": {"transferqueue.io/injected": f"default/{name}"},
    }
    words = ("run", "forged", "-n", "intruders", "--image=t:1", f"--overrides={json.dumps({'metadata': pod})}")
    assert plane.kubectl(*words).returncode == 0
    done = plane.kubectl("apply", "-n", "jobs", "-f", "-", stdin=deployment("encrypted", f"default_{name}"))
    assert done.returncode == 0, done.stderr

    def wanted() -> Any:
        pods = plane.request("GET", "/api/v1/namespaces/jobs/pods?labelSelector=app=encrypted")["items"]
        return [v["secret"]["secretName"] for pod in pods for v in pod["spec"]["volumes"] if "secret" in v]

    (mounted,) = wait_until(wanted, "the pod mounts a certificate")
    given = wait_until(lambda: secret(operator, mounted, "jobs"), "the certificate is made")
    assert not secret(operator, mounted, "intruders"), "a pod that only looks as if it had been given the queue"
    plane.kubectl("delete", "namespace", "intruders", "--wait=false")
    own = secret(operator, f"{name}-tls-client")
    assert given["ca.crt"] == own["ca.crt"]
    assert given["tls.key"] != own["tls.key"]
    assert set(given) == {"ca.crt", "tls.crt", "tls.key"}
    plane.kubectl("delete", "deployment", "encrypted", "-n", "jobs")
    plane.kubectl("delete", "transferqueue", name)
    wait_until(lambda: not secret(operator, mounted, "jobs"), "the certificate is deleted with the queue", 60)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "does not exist; create it"),
        ({"tls.crt": "x"}, "has no ca.crt and no tls.key"),
        ({"ca.crt": "x", "tls.crt": "x", "tls.key": "x"}, "has a tls.crt that is no certificate"),
    ],
)
def test_a_secret_that_cannot_be_used_is_told_about(operator: Operator, data: dict[str, str], words: str) -> None:
    plane, name = operator.plane, f"own-{len(data)}"
    if data:
        made = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-s"}, "stringData": data}
        plane.apply(yaml.safe_dump(made))
    apply(operator, name, f"{{tls: {{mode: secret, serverSecret: {name}-s, clientSecret: c}}}}")
    degraded = wait_until(
        lambda: (
            (found := condition(plane, name, "Degraded")) and found["reason"] == "SecretUnusable" and found["message"]
        ),
        "the Secret is told about",
    )
    assert f"Secret default/{name}-s {words}" in degraded
    plane.kubectl("delete", "transferqueue", name)


CERTIFICATES = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: certificates.cert-manager.io}
spec:
  group: cert-manager.io
  names: {kind: Certificate, listKind: CertificateList, plural: certificates, singular: certificate}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec: {type: object, x-kubernetes-preserve-unknown-fields: true}
            status: {type: object, x-kubernetes-preserve-unknown-fields: true}
"""


def test_certificates_of_an_issuer_are_asked_of_cert_manager_and_go_with_the_queue(operator: Operator) -> None:
    plane, name = operator.plane, "issued"
    apply(operator, name, "{tls: {mode: issuer, issuerRef: {name: corporate, kind: ClusterIssuer}}}")

    def degraded() -> str:
        return str(condition(plane, name, "Degraded").get("message", ""))

    wait_until(lambda: "needs cert-manager" in degraded(), "it is said that cert-manager is missing", 60)
    plane.apply(CERTIFICATES)
    server = f"{name}-issued-server"
    wait_until(lambda: plane.kubectl("get", "certificate", server).returncode == 0, "it is asked for", 120)
    template = (plane.get("deployment", f"{name}-controller") or {})["spec"]["template"]["spec"]
    assert [volume["secret"]["secretName"] for volume in template["volumes"] if "secret" in volume] == [server]
    assert not secret(operator, f"{name}-tls-ca"), "a CA of the operator's own"

    said = {"type": "Ready", "status": "False", "reason": "Pending", "message": "no such issuer"}
    tell = ("patch", "certificate", server, "--subresource=status", "--type=merge", "-p")
    assert plane.kubectl(*tell, json.dumps({"status": {"conditions": [said]}})).returncode == 0
    wait_until(lambda: "cert-manager says: no such issuer" in degraded(), "what cert-manager says is passed on", 60)
    said["status"] = "True"
    assert plane.kubectl(*tell, json.dumps({"status": {"conditions": [said]}})).returncode == 0
    wait_until(lambda: condition(plane, name, "Degraded")["status"] == "False", "it is made", 60)

    plane.kubectl("create", "namespace", "jobs")
    wait_until(lambda: plane.get("serviceaccount", "default", "jobs"), "the namespace is set up")
    asked = json.dumps({"metadata": {"labels": {"transferqueue.io/inject": f"default_{name}"}}})
    done = plane.kubectl("run", "issued", "-n", "jobs", "--image=t:1", f"--overrides={asked}")
    assert done.returncode == 0, done.stderr
    volumes = (plane.get("pod", "issued", "jobs") or {})["spec"]["volumes"]
    (mounted,) = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
    wait_until(lambda: plane.get("certificate", mounted, "jobs"), "the pod's certificate is asked for", 60)
    spec = (plane.get("certificate", mounted, "jobs") or {})["spec"]
    assert spec["secretName"] == mounted
    assert spec["issuerRef"] == {"name": "corporate", "kind": "ClusterIssuer", "group": "cert-manager.io"}

    metadata = {"name": mounted, "namespace": "jobs", **spec["secretTemplate"]}  # as cert-manager makes and leaves it
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Secret", "metadata": metadata}))
    plane.kubectl("delete", "pod", "issued", "-n", "jobs", "--now")
    plane.kubectl("delete", "transferqueue", name)
    for kind in ("certificate", "secret"):
        wait_until(lambda kind=kind: not plane.get(kind, mounted, "jobs"), f"its {kind} is deleted with the queue", 60)
