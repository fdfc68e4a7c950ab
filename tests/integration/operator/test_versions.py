"""Both versions of the API from a real apiserver, which has the operator convert between them."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.integration.operator.conftest import Operator, rendered_chart
from tests.integration.operator.control_plane import ControlPlane
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

KINDS = ("transferqueues", "transferqueuebindings")
SPEC = {"backend": {"mooncake": {"protocol": "tcp", "globalSegmentSize": "256Mi"}}, "storage": {"replicas": 1}}


def conversions(operator: Operator) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.health}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    counts = [float(line.split()[-1]) for line in lines if "_count{" in line and 'webhook="convert"' in line]
    return sum(counts)


def read(plane: ControlPlane, version: str, name: str) -> dict[str, Any]:
    path = f"/apis/transferqueue.io/{version}/namespaces/default/transferqueues/{name}"
    found: dict[str, Any] = plane.request("GET", path)
    return found


@pytest.fixture
def converting(operator: Operator) -> Iterator[Operator]:
    """The operator converts, called on loopback instead of through its Service."""
    plane = operator.plane
    authority = base64.b64encode(plane.authority.files.certificate.read_bytes()).decode()
    client = {"url": f"https://127.0.0.1:{operator.webhook}/convert", "caBundle": authority}
    webhook = {"conversionReviewVersions": ["v1"], "clientConfig": client}

    def convert_by(conversion: dict[str, Any]) -> None:
        for kind in KINDS:
            change = json.dumps({"spec": {"conversion": conversion}})
            done = plane.kubectl("patch", "crd", f"{kind}.transferqueue.io", "--type=merge", "-p", change)
            assert done.returncode == 0, done.stderr

    convert_by({"strategy": "Webhook", "webhook": webhook})
    yield operator
    convert_by({"strategy": "None", "webhook": None})


@pytest.mark.parametrize(("written", "other"), [("v1alpha1", "v1beta1"), ("v1beta1", "v1alpha1")])
def test_what_is_written_in_one_version_is_read_in_the_other_and_back(
    converting: Operator, written: str, other: str
) -> None:
    plane, name = converting.plane, f"as-{written}"
    head = {"apiVersion": f"transferqueue.io/{written}", "kind": "TransferQueue", "metadata": {"name": name}}
    plane.apply(yaml.safe_dump({**head, "spec": SPEC}))
    try:
        before = conversions(converting)
        wait_until(lambda: read(plane, other, name) and conversions(converting) > before, "the operator converts")

        def settled() -> bool:
            return bool(read(plane, other, name).get("status", {}).get("conditions"))

        wait_until(settled, "the status is seen in the other version")
        there, back = read(plane, other, name), read(plane, written, name)
        assert there["apiVersion"] == f"transferqueue.io/{other}"
        assert there["spec"] == back["spec"]
        assert back["spec"]["storage"]["replicas"] == 1
        there["spec"]["storage"]["replicas"] = 2
        plane.request("PUT", f"/apis/{there['apiVersion']}/namespaces/default/transferqueues/{name}", there)
        assert read(plane, written, name)["spec"]["storage"]["replicas"] == 2
    finally:
        plane.kubectl("delete", "transferqueue", name)


def test_the_chart_lets_the_operator_convert_where_it_is_told_to(plane: ControlPlane) -> None:
    manifests = rendered_chart(plane, "--set", "crds.conversion=Webhook")
    definitions = [manifest for manifest in manifests if manifest["kind"] == "CustomResourceDefinition"]
    assert definitions
    for definition in definitions:
        client = definition["spec"]["conversion"]["webhook"]["clientConfig"]
        assert "caBundle" not in client, "the operator writes it"
        assert client["service"] == {"name": "tq-operator", "namespace": "tq-system", "path": "/convert", "port": 443}
        text = yaml.safe_dump(definition)
        done = plane.kubectl("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=text)
        assert done.returncode == 0, done.stderr
