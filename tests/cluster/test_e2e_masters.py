"""Mooncake's masters over etcd on the real cluster, as kubectl tq shows them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.paths import REPOSITORY
from tests.cluster.product import (
    NAMESPACE,
    access,
    apply,
    job,
    logs,
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


def test_after_the_loss_of_the_etcd_for_trials_the_masters_start_over_and_it_is_said_what_was_lost(
    masters: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    apply(masters, job("keeps-on", "keeps_on.py", "node1", [], QUEUE))

    def outcomes() -> list[dict[str, Any]]:
        return [json.loads(line) for line in logs(masters, "keeps-on").splitlines() if line.startswith('{"time"')]

    def told() -> list[str]:
        path = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"
        found = access(masters).cluster.call("GET", path)["items"]
        return [each["note"] for each in found if each["reason"] == "RowsLost"]

    def names() -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in access(masters).pods(QUEUE)}

    try:
        wait_until(lambda: bool(outcomes()), "rows are put", 120)
        before, began = names(), time.time()
        masters.kubectl("delete", "pod", ETCD, "-n", NAMESPACE)
        wait_until(lambda: bool(told()), "it is said what was lost", 60)
        assert f"Pod {ETCD} was replaced" in told()[0]
        assert "bytes" in told()[0]

        def replaced() -> bool:
            now = names()
            return now.keys() == before.keys() and all(
                now[name] != uid for name, uid in before.items() if "controller" not in name
            )

        wait_until(replaced, "masters and storage units are new", 60)
        wait_ready(masters, QUEUE)
        ready = time.time()
        wait_until(lambda: outcomes()[-1]["outcome"] == "ok" and outcomes()[-1]["time"] > began, "puts go on", 120)
        with capsys.disabled():
            words = (
                f"Ready after {ready - began:.0f} s, the client goes on after {outcomes()[-1]['time'] - began:.0f} s"
            )
            print(f" {words} ", end="")
        (controller,) = (name for name in before if "controller" in name)
        assert names()[controller] == before[controller]
    finally:
        masters.kubectl("delete", "job", "keeps-on", "-n", NAMESPACE, "--wait=false")
