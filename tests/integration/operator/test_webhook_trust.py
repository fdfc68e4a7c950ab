"""The operator makes its certificate itself, and the apiserver trusts it throughout.

The host that its certificate names is ``localhost``, so that the apiserver of a plane without pods can call it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from tests.integration.operator.conftest import USER, Operator, environment, rendered_chart
from tests.integration.operator.control_plane import ControlPlane, free_port, process
from tests.integration.operator.test_operator import run_pod
from tests.waiting import wait_until
from transfer_queue.launch.certificates import issued_by

pytestmark = pytest.mark.timeout(1200)

NAME = "localhost"
SECRET = f"{NAME}-webhook-tls"
QUEUE = """
apiVersion: transferqueue.io/v1alpha1
kind: TransferQueue
metadata: {name: trusted, namespace: default}
spec: {backend: {simple: {}}}
"""


@pytest.fixture
def trusting(plane: ControlPlane, tmp_path: Path) -> Iterator[Operator]:
    webhook, health = free_port(), free_port()
    applied = []
    text = yaml.safe_dump_all(rendered_chart(plane)).replace("tq-operator", NAME)
    for manifest in yaml.safe_load_all(text):
        if manifest["kind"].endswith("RoleBinding"):
            manifest["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        for entry in manifest.get("webhooks", []):
            path = entry["clientConfig"]["service"]["path"]
            entry["clientConfig"] = {"url": f"https://{NAME}:{webhook}{path}"}
        kinds = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
        if manifest["kind"] in kinds or manifest["kind"].endswith("WebhookConfiguration"):
            applied.append(manifest)
    plane.apply(yaml.safe_dump_all(applied))
    variables = environment(
        plane,
        tmp_path / "served",
        webhook,
        health,
        TQ_LEASE_NAME=NAME,
        TQ_WEBHOOK_NAME=NAME,
        TQ_WEBHOOK_SECRET=SECRET,
    )
    try:
        with process([sys.executable, "-m", "tq_operator"], tmp_path / "log", **variables) as child:
            running = Operator(plane, child, health, tmp_path / "log", webhook)
            wait_until(running.ready, "the operator is ready", 60)
            yield running
    finally:
        plane.kubectl("delete", "-f", "-", "--wait=false", stdin=yaml.safe_dump_all(applied))


def bundles(plane: ControlPlane) -> list[str]:
    kinds = ("mutatingwebhookconfiguration", "validatingwebhookconfiguration")
    return [hook["clientConfig"]["caBundle"] for kind in kinds for hook in (plane.get(kind, NAME) or {})["webhooks"]]


def authorities(bundle: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(base64.b64decode(bundle))


def authority_of(plane: ControlPlane) -> x509.Certificate:
    found = (plane.get("secret", SECRET, "tq-system") or {}).get("data", {})
    return x509.load_pem_x509_certificate(base64.b64decode(found["ca.crt"]))


def test_no_pod_is_refused_while_the_authority_is_replaced_and_a_wrong_bundle_is_repaired(trusting: Operator) -> None:
    plane = trusting.plane
    plane.apply(QUEUE)
    first = authority_of(plane)
    assert [authorities(bundle) for bundle in bundles(plane)] == 3 * [[first]]
    assert run_pod(plane, "trusted").returncode == 0

    plane.kubectl("delete", "secret", SECRET, "-n", "tq-system")

    def replaced() -> Any:
        done = run_pod(plane, "trusted")
        assert done.returncode == 0, done.stderr
        return "took up a new certificate" in trusting.log.read_text()

    wait_until(replaced, "the certificate of the new authority is served", 60)
    second = authority_of(plane)
    assert second != first
    assert [authorities(bundle) for bundle in bundles(plane)] == 3 * [[second, first]]

    other = base64.b64encode(plane.authority.files.certificate.read_bytes()).decode()
    for number in range(2):
        change = f'[{{"op": "replace", "path": "/webhooks/{number}/clientConfig/caBundle", "value": "{other}"}}]'
        assert plane.kubectl("patch", "mutatingwebhookconfiguration", NAME, "--type=json", "-p", change).returncode == 0
    wait_until(lambda: second in authorities(bundles(plane)[0]), "the bundle is repaired", 30)
    wait_until(lambda: run_pod(plane, "trusted").returncode == 0, "pods are admitted", 30)
    served = plane.get("secret", SECRET, "tq-system") or {}
    assert issued_by(*(base64.b64decode(served["data"][key]) for key in ("tls.crt", "ca.crt")))
