"""Masters that take over from each other: what the status says of them, and which changes cost no row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.operator.queues import IMAGES, queue
from tests.unit.operator.test_status import NOW, child, condition
from tq_operator.plan.masters import etcd_data
from tq_operator.plan.names import child_name
from tq_operator.plan.queue import Queue, queue_from
from tq_operator.plan.status import MasterGroup, Observation, queue_status
from tq_operator.plan.step import lossy_change, next_step, wanted_children

EXAMPLE = Path(__file__).parents[3] / "charts" / "transferqueue" / "examples" / "ha-production"
SAMPLER = ", controller: {sampler: {name: RankAwareSampler}}}"
GROUP = "{backend: {mooncake: {protocol: tcp, MORE highAvailability: {masters: 3, etcd: ETCD}}}}"


def group(etcd: str = "{endpoints: ['etcd-0:2379', 'etcd-1:2379']}", more: str = "") -> Queue:
    return queue(GROUP.replace("ETCD", etcd).replace("MORE", more))


def test_the_masters_of_the_production_example_find_the_etcd_of_the_example() -> None:
    documents = {name: yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text()) for name in ("etcd", "queue")}
    etcd, size = documents["etcd"]["metadata"], documents["etcd"]["spec"]["size"]
    host = f"{etcd['name']}.{etcd['namespace']}.svc:2379"  # pods and Service as etcd-operator calls them
    members = ";".join(f"{etcd['name']}-{number}.{host}" for number in range(size))
    made = {**documents["queue"], "metadata": {**documents["queue"]["metadata"], "namespace": "ml", "uid": "u"}}
    (masters,) = (
        child
        for child in wanted_children(queue_from(made), IMAGES)
        if child["kind"] == "StatefulSet" and child["metadata"]["name"].endswith("masters")
    )
    (container,) = masters["spec"]["template"]["spec"]["containers"]
    assert f"--etcd_endpoints={members}" in container["command"] + container.get("args", [])


def observed(masters: MasterGroup | None, **more: Any) -> Observation:
    children = {
        **child("Deployment", "quickstart-controller", 1),
        **child("StatefulSet", "quickstart-storage", 2),
        **child("StatefulSet", "quickstart-mooncake-masters", 3),
    }
    return Observation(children=children, masters=masters, **more)


def test_the_status_names_the_leader() -> None:
    status = queue_status(group(), observed(MasterGroup(leader="quickstart-mooncake-masters-1")), {}, NOW)
    assert status["leader"] == "quickstart-mooncake-masters-1"
    assert status["master"]["summary"] == "3/3"
    assert status["endpoints"]["mooncakeMaster"] == "etcd://etcd-0:2379;etcd-1:2379"
    assert condition(status, "MasterServing")["status"] == "True"
    assert condition(status, "Ready")["status"] == "True"


@pytest.mark.parametrize(
    ("masters", "reason", "words"),
    [
        (MasterGroup(etcd="etcd-0:2379: Connection refused"), "EtcdUnreachable", "etcd-0:2379: Connection refused"),
        (MasterGroup(), "NoLeader", "choosing a leader"),
    ],
)
def test_a_queue_whose_masters_have_no_leader_is_not_ready_and_says_why(
    masters: MasterGroup, reason: str, words: str
) -> None:
    status = queue_status(group(), observed(masters), {}, NOW)
    assert "leader" not in status
    for kind in ("Ready", "MasterServing"):
        found = condition(status, kind)
        assert (found["status"], found["reason"]) == ("False", reason)
        assert words in found["message"]
    assert condition(status, "Degraded")["status"] == "True"


def test_the_etcd_that_the_operator_runs_is_a_part_like_the_others() -> None:
    status = queue_status(group("{development: {}}"), observed(MasterGroup(etcd="its pod is not ready")), {}, NOW)
    ready = condition(status, "Ready")
    assert ready["reason"] == "EtcdUnreachable"
    assert "etcd 0/1" in ready["message"]
    assert "Look at the pod quickstart-etcd-0" in ready["message"]


def test_masters_of_one_group_are_replaced_while_there_are_rows() -> None:
    before, after = group(), group(more="master: {image: 'own:2'},")
    assert lossy_change(before, after, holds_rows=True) == ""
    there = {(c["kind"], c["metadata"]["name"]): c for c in wanted_children(before, IMAGES)}
    ready = {"observedGeneration": 1, "updatedReplicas": 1, "readyReplicas": 1}
    there["Deployment", "quickstart-controller"]["status"] = ready
    step = next_step(after, IMAGES, there, holds_rows=True)
    assert [c["metadata"]["name"] for c in step.apply] == ["quickstart-mooncake-masters"]
    assert step.held == ""


@pytest.mark.parametrize(
    "other",
    [
        group("{endpoints: ['elsewhere:2379']}"),
        queue("{backend: {mooncake: {protocol: tcp}}}"),
        group("{development: {}}"),
    ],
)
def test_masters_that_would_start_empty_wait_until_there_are_no_rows(other: Queue) -> None:
    words = lossy_change(group(), other, holds_rows=True)
    assert "quickstart-mooncake-masters" in words
    assert "would be lost" in words


def test_a_later_queue_of_the_same_name_does_not_find_the_state_of_the_first() -> None:
    first = group()
    assert first.cluster_id != Queue(first.resource, "another-uid", 1).cluster_id
    assert child_name("a" * 253, "mooncake-masters").startswith("aaa")


def test_a_queue_is_not_ready_before_the_pod_of_its_etcd_is_seen_to_be() -> None:
    seen = observed(MasterGroup(leader="quickstart-mooncake-masters-1"))
    seen = replace(seen, children={**seen.children, **child("StatefulSet", "quickstart-etcd", 1)})
    for ready in ("False", "True"):
        status = queue_status(group("{development: {}}"), replace(seen, pods=[etcd_pod("two", ready)]), {}, NOW)
        assert condition(status, "Ready")["status"] == ready


def etcd_pod(uid: str, ready: str = "True") -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": {"name": "quickstart-etcd-0", "uid": uid}, "status": {"conditions": conditions}}


def test_masters_and_units_whose_etcd_lost_the_log_start_over_though_another_change_waits_for_rows() -> None:
    names = [f"quickstart-{part}" for part in ("mooncake-masters", "storage")]

    def written(found: Sequence[dict[str, Any]]) -> list[str]:
        return sorted(each["metadata"]["name"] for each in found if each["kind"] == "StatefulSet")

    before = group("{development: {}}")
    # As an earlier operator made them: the pod of today is the one they started with, and nothing restarts.
    children = {(each["kind"], each["metadata"]["name"]): each for each in wanted_children(before, IMAGES)}
    known = replace(before, etcd_data=etcd_data(before, children, [etcd_pod("one")]))
    step = next_step(known, IMAGES, children, True, 5)
    assert (written(step.apply), list(step.delete), step.lost, step.held) == (names, [], "", "")
    children |= {(each["kind"], each["metadata"]["name"]): each for each in step.apply}
    assert not next_step(known, IMAGES, children, True, 5).apply

    starting = replace(before, etcd_data=etcd_data(before, children, [etcd_pod("two", "False")]))
    assert not next_step(starting, IMAGES, children, True, 5).delete, "it waits for the new etcd"

    # The controller, whose sampler changes, has to keep its rows.
    after = queue(GROUP.replace("ETCD", "{development: {}}").replace("MORE", "")[:-1] + SAMPLER)
    replaced = replace(after, etcd_data=etcd_data(after, children, [etcd_pod("two")]))
    step = next_step(replaced, IMAGES, children, True, 5)
    assert (written(step.apply), written(step.delete)) == ([], names)
    assert "5 bytes" in step.lost
    assert "restarts quickstart-controller" in step.held
    for name in names:
        del children["StatefulSet", name]
    step = next_step(replaced, IMAGES, children, True, 5)
    assert (written(step.apply), written(step.delete), step.lost) == (names, [], "")
