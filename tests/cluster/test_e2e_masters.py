"""Mooncake's masters over etcd on the real cluster, as kubectl tq shows them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.paths import REPOSITORY
from tests.cluster.product import (
    NAMESPACE,
    access,
    apply,
    queue,
    tq,
    wait_ready,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE, MASTERS, ETCD = "ha", "mooncake-masters", "ha-etcd-0"
BUFFERS = ("tensorBufferSize", "bytesBufferSize", "controllerTensorBufferSize", "controllerBytesBufferSize")
MOONCAKE = {
    "protocol": "tcp",
    "globalSegmentSize": "128Mi",
    "localBufferSize": "32Mi",
    "zeroCopy": dict.fromkeys(BUFFERS, "32Mi"),
    "highAvailability": {"masters": 3, "etcd": {"development": {}}},
}


@pytest.fixture(scope="module")
def masters(replicated: Cluster) -> Iterator[Cluster]:
    """The cluster with a queue of three masters that is Ready."""
    apply(replicated, queue(QUEUE, backend={"mooncake": MOONCAKE}, storage={"replicas": 2, "capacity": "128Mi"}))
    wait_ready(replicated, QUEUE)
    yield replicated
    replicated.kubectl("delete", "-n", NAMESPACE, f"tq/{QUEUE}", "--timeout=60s")


def leader(cluster: Cluster) -> str:
    """Empty while none serves."""
    return str(access(cluster).queue(QUEUE)["status"].get("leader", ""))


def test_the_plugin_shows_masters_and_their_etcd(masters: Cluster) -> None:
    found = json.loads(tq(masters, "status", QUEUE, "-o", "json"))
    parts = {each["part"]: (each["ready"], each["replicas"], len(each["pods"])) for each in found["parts"]}
    assert parts == {"controller": (1, 1, 1), "storage": (2, 2, 2), MASTERS: (3, 3, 3), "etcd": (1, 1, 1)}
    assert len({pod["node"] for each in found["parts"] if each["part"] == MASTERS for pod in each["pods"]}) == 2
    assert found["leader"] == leader(masters) != ""
    assert f"{found['leader']} leads the masters" in tq(masters, "status", QUEUE)
    findings = json.loads(tq(masters, "doctor", QUEUE, "-o", "json"))
    assert [each for each in findings if each["state"] == "fail"] == []
    assert tq(masters, "top", QUEUE, "--once")
    for part, pod in ((MASTERS, found["leader"]), ("etcd", ETCD)):
        assert f"{pod}  " in tq(masters, "logs", QUEUE, "--part", part, "--tail", "5")
    with pytest.raises(ClusterError, match="run tq drain ha-storage-0 in a pod that uses the queue"):
        tq(masters, "drain", "ha-storage-0", "--queue", QUEUE)


def test_the_plugin_forwards_a_port_of_a_master(masters: Cluster) -> None:
    words = ["port-forward", QUEUE, ":metrics", "--part", MASTERS, "--kubeconfig", str(masters.kubeconfig)]
    command = [sys.executable, "-m", "tq_operator.kubectl", *words, "-n", NAMESPACE]
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'operator'}", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=path) as forwarding:
        try:
            assert forwarding.stdout is not None
            address, _, what = forwarding.stdout.readline().partition(" ")
            assert what.strip() == f"is metrics of {MASTERS}"
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://{address}/health", timeout=20) as answer:
                assert json.load(answer)["leader_address"]
        finally:
            forwarding.send_signal(signal.SIGINT)
