"""The product's images: what is in them, that they run on a node as they are, and when they are built anew."""

from __future__ import annotations

import json

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import build_image, image_names, image_reference

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FOUND = (
    "import importlib.util as u, json, os, sys; print(json.dumps([os.getuid(), *(bool(u.find_spec(m)) for m in {})]))"
)
MODULES = ["transfer_queue", "msgspec", "torch", "tensordict", "mooncake", "kopf", "tq_operator", "gymnasium", "ray"]
EXPECTED = {
    "server": {"transfer_queue", "msgspec"},
    "operator": {"transfer_queue", "msgspec", "kopf", "tq_operator"},
    "mooncake": {"transfer_queue", "msgspec", "mooncake"},
    "trainer": {"transfer_queue", "msgspec", "mooncake", "torch", "tensordict", "gymnasium"},
    "ray": {"transfer_queue", "msgspec", "mooncake", "torch", "tensordict", "gymnasium", "ray"},
}


def run_pod(cluster: Cluster, image: str, node: str, command: list[str] | None, arguments: list[str]) -> str:
    """Run a pod of the loaded image to its end and return what it printed."""
    name = f"image-{image}"
    container: dict[str, object] = {
        "name": "main",
        "image": image_reference(image),
        "imagePullPolicy": "Never",
        "args": arguments,
        "securityContext": {"runAsNonRoot": True, "allowPrivilegeEscalation": False},
    }
    if command:
        container["command"] = command
    spec = {"nodeName": node, "restartPolicy": "Never", "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    try:
        ended = "--for=jsonpath={.status.containerStatuses[0].state.terminated}"
        cluster.kubectl("wait", f"pod/{name}", ended, "--timeout=120s")
        printed = cluster.kubectl("logs", name)
        code = "{.status.containerStatuses[0].state.terminated.exitCode}"
        assert cluster.kubectl("get", "pod", name, "-o", f"jsonpath={code}") == "0", printed
        return printed
    finally:
        cluster.kubectl("delete", "pod", name, "--wait", "--timeout=60s")


def test_every_image_has_an_expectation() -> None:
    assert set(image_names()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_image_runs_as_its_own_user_with_its_packages_and_no_others(cluster: Cluster, name: str) -> None:
    cluster.load(name)
    printed = run_pod(cluster, name, "node1", ["python", "-c", FOUND.format(MODULES)], [])
    user, *found = json.loads(printed)
    assert user == 65532
    assert {module for module, there in zip(MODULES, found, strict=True) if there} == EXPECTED[name]


def test_the_server_s_entry_point_is_tq(cluster: Cluster) -> None:
    cluster.load("server")
    assert "Usage: tq" in run_pod(cluster, "server", "node2", None, ["--help"])


def test_mooncake_s_master_finds_its_libraries(cluster: Cluster) -> None:
    cluster.load("mooncake")
    assert "enable_http_metadata_server" in run_pod(
        cluster, "mooncake", "node2", ["sh", "-c", "mooncake_master --help || true"], []
    )


def test_the_trainer_computes_and_finds_the_examples_and_mooncake_s_client(cluster: Cluster) -> None:
    cluster.load("trainer")
    code = (
        "import torch, tensordict, gymnasium, mooncake.store, os;"
        "print(int(torch.ones(3).sum()), 'cartpole' in os.listdir('/opt/transferqueue/examples'))"
    )
    assert run_pod(cluster, "trainer", "node2", ["python", "-c", code], []).split() == ["3", "True"]


def test_an_unchanged_image_is_not_built_again(privileged: None) -> None:
    first = build_image("server")
    identity = first.stat().st_ino
    again = build_image("server")
    assert (again, again.stat().st_ino) == (first, identity)


def test_an_image_without_a_dockerfile_is_refused_naming_those_there_are() -> None:
    with pytest.raises(ClusterError, match="mooncake, operator, ray, server, trainer"):
        build_image("no-such-image")
