"""The chart on the real cluster with other images, there and back, while a queue is full of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.component import wait_until
from tests.cluster.images import image_reference
from tests.cluster.product import (
    CHART,
    NAMESPACE,
    OPERATOR,
    RELEASE,
    SYSTEM,
    access,
    apply,
    finish,
    job,
    logs,
    pod_of,
    queue,
    report,
    wait_ready,
)
from tq_operator.kubectl.access import condition, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUEUE = "full"
IMAGES = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
NEXT = {name: IMAGES[name].partition(":")[0] + ":next" for name in ("operator", "server")}


@pytest.fixture
def full(replicated: Cluster) -> Iterator[Cluster]:
    """The cluster with a queue that keeps no journal, whose rows a Job puts, reads and compares all the time."""
    for name, image in NEXT.items():
        for node in replicated.nodes:
            node.name_image(image_reference(name), f"docker.io/{image}")
    apply(replicated, queue(QUEUE, backend={"simple": {}}, storage={"replicas": 1, "capacity": "64Mi"}))
    wait_ready(replicated, QUEUE)
    apply(replicated, job("changes", "changes.py", "node1", [], QUEUE))
    wait_until(lambda: "reading" in logs(replicated, "changes"), "rows are put and read", 120)
    yield replicated
    replicated.kubectl("delete", "-n", NAMESPACE, f"tq/{QUEUE}", "job/changes", "--timeout=60s")


def test_an_upgrade_of_the_chart_and_the_way_back_cost_a_full_queue_no_row_and_no_pod(full: Cluster) -> None:
    def pods() -> dict[str, str]:
        found = access(full).pods(QUEUE)
        return {pod["metadata"]["uid"]: pod["spec"]["containers"][0]["image"] for pod in found if is_ready(pod)}

    def held() -> dict[str, Any]:
        found = condition(access(full).queue(QUEUE), "Progressing")
        return found if found["reason"] == "Held" else {}

    def operator() -> str:
        path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{OPERATOR}"
        return str(access(full).cluster.call("GET", path)["spec"]["template"]["spec"]["containers"][0]["image"])

    before, place = pods(), ("-n", SYSTEM, "--wait", "--timeout=120s")
    assert len(before) == 2
    words = [word for name, image in NEXT.items() for word in ("--set", f"images.{name}={image}")]
    full.helm("upgrade", RELEASE, str(CHART), *place, "--reuse-values", *words)
    assert operator() == NEXT["operator"]
    wait_until(lambda: bool(held()), "the new image waits until the queue is empty", 60)
    full.helm("rollback", RELEASE, *place)
    assert operator() == IMAGES["operator"]
    wait_until(lambda: not held(), "nothing waits any more", 60)
    assert pods() == before
    stop = "tq put control stop x=1 > /dev/null 2>&1 &"
    full.kubectl("exec", "-n", NAMESPACE, pod_of(full, "changes"), "--", "sh", "-c", stop)
    finish(full, ["changes"])
    assert report(full, "changes")["read"] > report(full, "changes")["put"] > 0
