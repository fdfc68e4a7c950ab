"""A queue of two controllers on the real cluster: one of them is killed, and its own partitions only wait for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.product import (
    NAMESPACE,
    access,
    apply,
    finish,
    hanging_kubelet,
    job,
    kill,
    logs,
    pod_of,
    queue,
    report,
    tq,
    wait_ready,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE, NODES = "sharded", ("node1", "node2")
JOBS = {node: f"shards-{node}" for node in NODES}
MEANWHILE = 20


@pytest.fixture(scope="module")
def sharded(installed: Cluster) -> Iterator[Cluster]:
    """The cluster with a queue of two shards on node1 that is Ready."""
    controller = {"shards": 2, "durability": "process", "nodeSelector": {"kubernetes.io/hostname": "node1"}}
    storage = {"replicas": 2, "capacity": "64Mi", "drainSeconds": 0}
    apply(installed, queue(QUEUE, backend={"simple": {}}, controller=controller, storage=storage))
    try:
        wait_ready(installed, QUEUE)
        yield installed
    finally:
        names = [f"job/{name}" for name in JOBS.values()]
        installed.kubectl("delete", "-n", NAMESPACE, *names, f"tq/{QUEUE}", "--ignore-not-found", "--timeout=60s")


def turns(cluster: Cluster, node: str) -> list[int]:
    """How many the Job on ``node`` had in the partitions of each shard."""
    said = re.findall(r"^([01]) (\d+)$", logs(cluster, JOBS[node]), re.MULTILINE)
    return [max((int(turn) for number, turn in said if int(number) == shard), default=0) for shard in range(2)]


def restarts(cluster: Cluster) -> tuple[str, dict[str, int]]:
    """uid of the controllers' pod, and how often each of its containers was started again."""
    (pod,) = access(cluster).pods(QUEUE, "controller")
    counts = {each["name"]: each["restartCount"] for each in pod["status"]["containerStatuses"]}
    return pod["metadata"]["uid"], counts


def test_a_killed_shard_costs_its_own_partitions_only_and_comes_back_with_their_rows(
    sharded: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = sharded
    apply(cluster, *(job(name, "shards.py", node, [], QUEUE) for node, name in JOBS.items()))
    wait_until(lambda: all(min(turns(cluster, node)) > 2 for node in NODES), "both Jobs use both shards", 120)
    shown = json.loads(tq(cluster, "top", QUEUE, "--once", "-o", "json"))
    assert len(shown["partitions"]) == 16, "the plugin sees all shards"
    findings = json.loads(tq(cluster, "doctor", QUEUE, "-o", "json"))
    assert [each for each in findings if each["state"] == "fail"] == []
    uid, before = restarts(cluster)
    assert before == {"controller-0": 0, "controller-1": 0}
    (pod,) = (each["metadata"]["name"] for each in access(cluster).pods(QUEUE, "controller"))
    # The logs of its own pods cannot be read meanwhile: those of the other node tell how the Jobs fare.
    with hanging_kubelet(cluster, "node1"):
        kill(cluster, NAMESPACE, pod, "controller-1.yaml")
        first = turns(cluster, "node2")
        wait_until(lambda: turns(cluster, "node2")[0] > first[0] + MEANWHILE, "shard 0 goes on without shard 1", 60)
        assert turns(cluster, "node2")[1] <= first[1] + 1
    after = {node: turns(cluster, node) for node in NODES}
    wait_until(lambda: all(turns(cluster, node)[1] > after[node][1] + 5 for node in NODES), "shard 1 serves again", 120)
    counts = {"controller-0": 0, "controller-1": 1}
    wait_until(lambda: restarts(cluster) == (uid, counts), "the container of shard 1 alone was started again", 30)
    wait_ready(cluster, QUEUE)
    assert f"{pod}/controller-1  " in tq(cluster, "logs", QUEUE, "--part", "controller", "--tail", "5")
    for name in JOBS.values():
        cluster.kubectl("exec", "-n", NAMESPACE, pod_of(cluster, name), "--", "sh", "-c", "echo > /tmp/stop")
    finish(cluster, JOBS.values(), 60)
    for name in JOBS.values():
        found = report(cluster, name)
        with capsys.disabled():
            print(f" {name}: {found} ", end="")
        assert found["meanwhile"] >= MEANWHILE
        assert found["longest_s"][0] < found["longest_s"][1]
