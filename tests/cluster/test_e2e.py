"""The product on the real cluster: the quick start of the docs, Jobs on both nodes, storage that moves."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.errors import ClusterError
from tests.cluster.images import image_reference
from tests.cluster.paths import REPOSITORY
from tests.cluster.product import (
    CHART,
    NAMESPACE,
    PAGE,
    access,
    apply,
    blocks,
    finish,
    follow,
    job,
    logs,
    pod_of,
    report,
    tq,
    wait_ready,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

WORKERS, GROUPS, GROUP_SIZE = 2, 4, 8
DRAIN = ("drain", "node2", "--ignore-daemonsets", "--delete-emptydir-data")


def test_the_commands_of_the_quick_start_lead_to_a_pod_that_puts_and_gets(
    installed: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    _, *commands = blocks(PAGE)
    said = follow(installed, "\n".join(commands).replace("YOUR-IMAGE", image_reference("trainer")))
    with capsys.disabled():
        print(f" from kubectl apply to a pod that has put and got: {time.monotonic() - began:.0f} s ", end="")
    assert said.splitlines()[-1] == "[1]"


def test_rollout_data_reaches_a_trainer_on_the_other_node_byte_for_byte(
    installed: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    began, episodes = time.monotonic(), WORKERS * GROUPS * GROUP_SIZE
    apply(
        installed,
        job("rollout", "rollout.py", "node1", [str(GROUPS)], "quickstart", completions=WORKERS),
        job("trainer", "trainer.py", "node2", [str(episodes)], "quickstart"),
    )
    wait_until(lambda: "first batch" in logs(installed, "trainer"), "the trainer's first batch", 180)
    with capsys.disabled():
        print(f" to the trainer's first batch: {time.monotonic() - began:.0f} s ", end="")
    finish(installed, ("rollout", "trainer"))
    found = report(installed, "trainer")
    assert found["episodes"] == episodes
    assert len(found["hosts"]) == WORKERS
    installed.kubectl("delete", "-n", NAMESPACE, "tq/quickstart", "job/rollout", "job/trainer", "--timeout=60s")


def test_the_storage_grows_shrinks_rolls_and_leaves_a_node_under_load_without_losing_a_row(
    replicated: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = replicated
    queue = yaml.safe_load((CHART / "examples" / "laptop" / "queue.yaml").read_text())
    queue["metadata"]["namespace"], name = NAMESPACE, queue["metadata"]["name"]
    queue["spec"] |= {"disruptionBudget": True}
    queue["spec"]["controller"] = {"nodeSelector": {"kubernetes.io/hostname": "node1"}}
    apply(cluster, queue)
    wait_ready(cluster, name)
    apply(cluster, job("changes", "changes.py", "node1", [], name))
    wait_until(lambda: "reading" in logs(cluster, "changes"), "rows are put and read", 120)

    def units(label: str = "controller-revision-hash") -> dict[str, str]:
        """Storage pods that run, and the revision of each, or its node."""
        calls = access(cluster)
        chosen = [("labelSelector", calls.queue(name)["status"]["storage"]["selector"])]
        pods = calls.cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", query=chosen)["items"]
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"] if label == "node" else pod["metadata"]["labels"][label]
            for pod in pods
            if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        }

    def scaled(replicas: int) -> None:
        began = time.monotonic()
        cluster.kubectl("scale", "-n", NAMESPACE, f"tq/{name}", f"--replicas={replicas}")
        wanted = {f"{name}-storage-{number}" for number in range(replicas)}
        wait_until(lambda: set(units()) == wanted, f"{replicas} storage units", 120)
        with capsys.disabled():
            print(f" to {replicas} units: {time.monotonic() - began:.0f} s ", end="")

    scaled(3)
    scaled(2)
    before, began = units(), time.monotonic()
    queue["spec"]["storage"] |= {"replicas": 2, "annotations": {"example.com/rolled": "yes"}}
    apply(cluster, queue)

    def rolled() -> bool:
        now = units()
        return set(now) == set(before) and not set(now.values()) & set(before.values())

    wait_until(rolled, "both storage units were replaced", 180)
    with capsys.disabled():
        print(f" rolled: {time.monotonic() - began:.0f} s ", end="")

    began = time.monotonic()
    (leaving,) = (unit for unit, node in units("node").items() if node == "node2")
    with pytest.raises(ClusterError, match="violate the pod's disruption budget"):
        cluster.kubectl(*DRAIN, "--timeout=3s")
    try:
        tq(cluster, "drain", leaving, "--queue", name, "--timeout", "60")
        cluster.kubectl("delete", "pod", leaving, "-n", NAMESPACE, "--timeout=60s")
        cluster.kubectl(*DRAIN, "--timeout=90s")
        wait_until(lambda: units("node") == dict.fromkeys(before, "node1"), "both storage units run on node1", 60)
    finally:
        cluster.kubectl("uncordon", "node2")
    with capsys.disabled():
        print(f" node drained: {time.monotonic() - began:.0f} s ", end="")
    # In the background, as the pod ends with the Job, perhaps before the command does.
    stop = "tq put control stop x=1 > /dev/null 2>&1 &"
    cluster.kubectl("exec", "-n", NAMESPACE, pod_of(cluster, "changes"), "--", "sh", "-c", stop)
    finish(cluster, ["changes"], 60)
    found = report(cluster, "changes")
    assert found["read"] > found["put"] > 0
    cluster.kubectl("delete", "-n", NAMESPACE, f"tq/{name}", "job/changes", "--timeout=60s")


def test_wrong_yaml_is_refused_with_the_words_of_tq_up(installed: Cluster) -> None:
    wrong = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    wrong["metadata"] = {"name": "wrong", "namespace": "default"}
    wrong["spec"]["backend"]["simple"] = {}
    with pytest.raises(ClusterError, match="exactly one of simple, mooncake, yuanrong, ray"):
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(wrong))
