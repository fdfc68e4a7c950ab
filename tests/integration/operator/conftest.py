"""The operator as a process of its own, with only the rights the chart gives it, against a real apiserver."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.operator.control_plane import ControlPlane, control_plane, free_port, process
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts" / "transferqueue"
RELEASE = ("tq", "tq-system")
USER = "transferqueue-operator"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with an operator of their own come before the one of the session, which would do its work."""
    items.sort(key=lambda item: "operator" in getattr(item, "fixturenames", ()))


@dataclass
class Operator:
    """A running operator and the apiserver it works with."""

    plane: ControlPlane
    child: subprocess.Popen[bytes]
    health: int
    log: Path
    webhook: int = 0
    """Port of its webhooks."""

    def ready(self) -> bool:
        assert self.child.poll() is None, f"the operator ended:\n{self.log.read_text()[-3000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def rendered_chart(plane: ControlPlane, *options: str) -> list[dict[str, Any]]:
    """Manifests of the chart, rendered by helm as it would install them."""
    name, namespace = RELEASE
    command = [plane.binaries / "helm", "template", name, CHART, "--namespace", namespace, *options]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def environment(plane: ControlPlane, certificates: Path, webhook: int, health: int, **more: str) -> dict[str, str]:
    python_path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "operator")])
    return {
        "KUBECONFIG": str(plane.kubeconfig_for(USER)),
        "TQ_IMAGE_SERVER": "registry.example/server:1",
        "TQ_IMAGE_MOONCAKE": "registry.example/mooncake:1",
        "TQ_RESYNC_SECONDS": "1",
        "TQ_LEASE_NAMESPACE": RELEASE[1],
        "POD_NAME": f"operator-{health}",
        "TQ_WEBHOOK_PORT": str(webhook),
        "TQ_HEALTH_PORT": str(health),
        "TQ_WEBHOOK_CERTIFICATES": str(certificates),
        "PYTHONPATH": python_path,
        **more,
    }


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with chart_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@contextmanager
def chart_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane with the definitions and rights of the chart."""
    with control_plane(folder) as running:
        manifests = rendered_chart(running)
        running.kubectl("create", "namespace", RELEASE[1])
        for manifest in manifests:
            if manifest["kind"] in {"ClusterRoleBinding", "RoleBinding"}:
                manifest["subjects"] = [{"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}]
        kinds = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
        running.apply(yaml.safe_dump_all(manifest for manifest in manifests if manifest["kind"] in kinds))
        wait_until(
            lambda: running.kubectl("get", "transferqueues").returncode == 0, "the apiserver serves TransferQueues"
        )
        yield running


def write_certificate(plane: ControlPlane, folder: Path, name: str = "webhook") -> None:
    """A certificate for 127.0.0.1 as the kubelet would mount it."""
    folder.mkdir(exist_ok=True)
    pair = plane.authority.issue(name, name, hosts=("127.0.0.1",))
    (folder / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (folder / "tls.key").write_bytes(pair.key.read_bytes())


@pytest.fixture(scope="package")
def certificates(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificate(plane, folder)
    return folder


@pytest.fixture(scope="package")
def operator(plane: ControlPlane, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """With the chart's webhooks, which call it on loopback instead of through a Service."""
    folder, webhook, health = tmp_path_factory.mktemp("operator"), free_port(), free_port()
    command = [sys.executable, "-m", "tq_operator"]
    variables = environment(plane, certificates, webhook, health)
    with process(command, folder / "operator.log", **variables) as child:
        running = Operator(plane, child, health, folder / "operator.log", webhook)
        wait_until(running.ready, "the operator is ready")
        authority = base64.b64encode(plane.authority.files.certificate.read_bytes()).decode()
        for manifest in rendered_chart(plane):
            if not manifest["kind"].endswith("WebhookConfiguration"):
                continue
            for entry in manifest["webhooks"]:
                path = entry["clientConfig"]["service"]["path"]
                entry["clientConfig"] = {"url": f"https://127.0.0.1:{webhook}{path}", "caBundle": authority}
            plane.apply(yaml.safe_dump(manifest))
        yield running
