"""What is observed of the children, and what the status says about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.operator.queues import document, queue
from tq_operator.plan.problems import Problem
from tq_operator.plan.queue import queue_from
from tq_operator.plan.status import Observation, queue_status, refused_status
from transfer_queue.config.running import CheckpointReport, Restored

QUEUE = queue("{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}}")
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def child(kind: str, name: str, ready: int, **status: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """A workload and its Service."""
    counts = {"observedGeneration": 1, "readyReplicas": ready, "updatedReplicas": ready}
    labels = {"part": name}
    service = {"kind": "Service", "metadata": {"name": name}, "spec": {"selector": labels}}
    workload = {
        "kind": kind,
        "metadata": {"name": name, "generation": 1},
        "spec": {"template": {"metadata": {"labels": labels}}},
        "status": {**counts, **status},
    }
    return {(kind, name): workload, ("Service", name): service}


def observed(controller: int = 1, storage: int = 2, master: int = 1, **more: Any) -> Observation:
    children = {
        **child("Deployment", "quickstart-controller", controller),
        **child("StatefulSet", "quickstart-storage", storage),
        **child("StatefulSet", "quickstart-mooncake-master", master),
    }
    return Observation(children={**children, **more.pop("children", {})}, **more)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = (entry for entry in status["conditions"] if entry["type"] == kind)
    return found


def pod(name: str = "quickstart-storage-0", part: str = "storage", **container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/component": part}},
        "status": {"containerStatuses": [{"name": part, "image": "own:1", "ready": False, **container}]},
    }


def test_a_queue_is_ready_when_every_part_is() -> None:
    status = queue_status(QUEUE, observed(), {}, NOW)
    assert condition(status, "Ready")["status"] == "True"
    assert condition(status, "Progressing")["status"] == "False"
    assert condition(status, "Degraded")["status"] == "False"
    assert status["storage"]["summary"] == "2/2"
    assert status["storage"]["capacity"] == "512Mi"
    assert status["observedGeneration"] == 3


def test_a_queue_whose_service_selects_no_pod_is_not_ready() -> None:
    seen = observed()
    service = seen.children["Service", "quickstart-controller"]
    service["spec"]["selector"] = {**service["spec"]["selector"], "foreign": "yes"}
    ready = condition(queue_status(QUEUE, seen, {}, NOW), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoEndpoints")
    assert "Service quickstart-controller selects no pod of controller" in ready["message"]
    there = {key: child for key, child in observed().children.items() if key != ("Service", "quickstart-storage")}
    ready = condition(queue_status(QUEUE, Observation(children=there), {}, NOW), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoEndpoints")


def test_the_endpoints_are_the_services() -> None:
    assert queue_status(QUEUE, Observation(), {}, NOW)["endpoints"] == {
        "controller": "quickstart-controller.rl.svc:50060",
        "mooncakeMaster": "quickstart-mooncake-master.rl.svc:50051",
        "metadataServer": "http://quickstart-mooncake-master.rl.svc:8080/metadata",
    }


def test_clients_may_attach_to_every_shard() -> None:
    made = queue("{backend: {simple: {}}, controller: {shards: 2}}")
    endpoints = queue_status(made, Observation(), {}, NOW)["endpoints"]
    assert endpoints == {"controller": "quickstart-controller.rl.svc:50060,quickstart-controller.rl.svc:50061"}


def test_of_several_containers_the_one_that_failed_is_named() -> None:
    failing = pod("quickstart-controller-0", "controller", ready=True, state={"running": {}})
    ended = {"terminated": {"exitCode": 1, "message": "error: no space"}}
    other = {"name": "controller-1", "ready": False, "restartCount": 2, "lastState": ended}
    failing["status"]["containerStatuses"].append(other)
    status = queue_status(QUEUE, observed(controller=0, pods=[failing]), {}, NOW)
    words = "Pod quickstart-controller-0/controller-1 ended 2 times, last: no space"
    assert condition(status, "Degraded")["message"] == words


@pytest.mark.parametrize("part", ["controller", "storage", "master"])
def test_one_missing_part_makes_the_queue_unready_and_is_named(part: str) -> None:
    ready = condition(queue_status(QUEUE, observed(**{part: 0}), {}, NOW), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PodsNotReady")
    assert {"controller": "controller 0/1", "storage": "storage 0/2", "master": "mooncake-master 0/1"}[part] in ready[
        "message"
    ]


def test_pods_of_an_older_template_do_not_count() -> None:
    old = child("Deployment", "quickstart-controller", 1, observedGeneration=0)
    assert condition(queue_status(QUEUE, observed(children=old), {}, NOW), "Ready")["status"] == "False"


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    first = queue_status(QUEUE, observed(storage=1), {}, NOW)
    same = queue_status(QUEUE, observed(storage=1), first, LATER)
    assert same == first
    changed = queue_status(QUEUE, observed(), first, LATER)
    assert condition(changed, "Ready")["lastTransitionTime"] == LATER
    assert condition(changed, "Degraded")["lastTransitionTime"] == NOW


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        (
            {
                "restartCount": 4,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {
                    "terminated": {"exitCode": 1, "message": "log\nerror: port 50070 is in use; choose another\n"}
                },
            },
            "CrashLooping",
            "Pod quickstart-storage-0 ended 4 times, last: port 50070 is in use; choose another",
        ),
        (
            {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "state": {}},
            "OutOfMemory",
            "Pod quickstart-storage-0 was killed for using more memory than its limit; raise it.",
        ),
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}},
            "ImagePullFailed",
            "Pod quickstart-storage-0 cannot get image own:1: not found",
        ),
        (
            {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no such key"}}},
            "ContainerNotCreated",
            "Pod quickstart-storage-0: no such key",
        ),
    ],
)
def test_a_failing_pod_is_told_about_in_its_own_words(container: dict[str, Any], reason: str, words: str) -> None:
    status = queue_status(QUEUE, observed(storage=1, pods=[pod(**container)]), {}, NOW)
    degraded, ready = condition(status, "Degraded"), condition(status, "Ready")
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", reason, words)
    assert ready["reason"] == reason
    assert words in ready["message"]


def test_the_root_of_a_failure_comes_before_what_follows_from_it() -> None:
    ended = {"restartCount": 1, "state": {}, "lastState": {"terminated": {"exitCode": 1, "message": "cannot reach"}}}
    pods = [pod(**ended), pod("quickstart-mooncake-master-0", "mooncake-master", **ended)]
    message = condition(queue_status(QUEUE, observed(storage=0, master=0, pods=pods), {}, NOW), "Degraded")["message"]
    assert "mooncake-master-0" in message


def test_a_pod_that_ended_once_and_is_ready_again_is_no_problem() -> None:
    healthy = pod(ready=True, restartCount=1, lastState={"terminated": {"exitCode": 1}}, state={"running": {}})
    assert condition(queue_status(QUEUE, observed(pods=[healthy]), {}, NOW), "Degraded")["status"] == "False"


def test_a_pod_without_a_node_says_what_is_missing() -> None:
    waiting = pod()
    waiting["status"] = {
        "conditions": [
            {"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes: 2 Insufficient memory."}
        ]
    }
    degraded = condition(queue_status(QUEUE, observed(storage=1, pods=[waiting]), {}, NOW), "Degraded")
    assert (degraded["reason"], degraded["message"]) == (
        "Unschedulable",
        "Pod quickstart-storage-0 has no node: 0/2 nodes: 2 Insufficient memory.",
    )


def test_a_pod_whose_claim_no_node_can_fulfil_waits_for_rdma() -> None:
    words = "0/2 nodes are available: 2 cannot allocate all claims."
    waiting = pod()
    waiting["status"] = {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": words}]}
    degraded = condition(queue_status(QUEUE, observed(storage=1, pods=[waiting]), {}, NOW), "Degraded")
    assert degraded["reason"] == "RdmaUnavailable"


def test_a_refused_write_is_told_about_although_all_pods_are_ready() -> None:
    seen = observed(problems=[Problem("ApplyFailed", "Service quickstart-storage: no")])
    status = queue_status(QUEUE, seen, {}, NOW)
    assert condition(status, "Ready")["status"] == "True"
    assert condition(status, "Degraded")["reason"] == "ApplyFailed"


def test_a_queue_with_an_object_of_somebody_else_in_its_place_is_not_ready_whatever_runs_there() -> None:
    seen = observed(problems=[Problem("NameConflict", "Service quickstart-storage exists")])
    status = queue_status(QUEUE, seen, {}, NOW)
    ready = condition(status, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameConflict")
    assert ready["message"] == "Service quickstart-storage exists"


def test_a_spec_that_is_not_valid_keeps_what_was_known_and_says_why() -> None:
    before = queue_status(QUEUE, observed(), {}, NOW)
    status = refused_status(4, "spec.backend: set exactly one of simple", before, LATER)
    assert condition(status, "Ready")["message"] == "spec.backend: set exactly one of simple"
    assert status["endpoints"] == before["endpoints"]
    assert status["observedGeneration"] == 4


def test_a_queue_is_not_loaded_again_after_a_spec_that_was_not_valid() -> None:
    wanted = queue("{backend: {simple: {}}, restoreFrom: s3://b/1}")
    done = CheckpointReport(restored=Restored("s3://b/1", True, "loaded 7 rows"))
    before = queue_status(wanted, observed(checkpoint=done), {}, NOW)
    status = refused_status(4, "spec.backend: set exactly one of simple", before, LATER)
    assert not queue_from({**document("{backend: {simple: {}}, restoreFrom: s3://b/1}"), "status": status}).restores


def test_use_and_injected_pods_are_reported_readably() -> None:
    status = queue_status(QUEUE, observed(used=3 * 2**29, injected=7), {}, NOW)
    assert (status["storage"]["used"], status["injected"]) == ("1.5Gi", 7)


def test_a_backend_without_storage_units_waits_only_for_the_controller() -> None:
    ray = queue("{backend: {ray: {}}}")
    seen = Observation(children=child("Deployment", "quickstart-controller", 1))
    assert condition(queue_status(ray, seen, {}, NOW), "Ready")["status"] == "True"


def test_a_queue_is_read_from_what_the_apiserver_holds() -> None:
    found = queue_from(
        {
            "apiVersion": "transferqueue.io/v1alpha1",
            "kind": "TransferQueue",
            "metadata": {"name": "q", "namespace": "n", "uid": "u", "generation": 5, "resourceVersion": "9"},
            "spec": {"backend": {"simple": {"numUnits": 16}}},
            "status": {"conditions": []},
        }
    )
    assert (found.name, found.namespace, found.uid, found.generation) == ("q", "n", "u", 5)


def test_a_queue_without_a_pod_of_a_part_is_not_ready() -> None:
    none = queue("{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}, storage: {replicas: 0}}")
    ready = condition(queue_status(none, observed(storage=0), {}, NOW), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoReplicas")
    assert "spec.storage.replicas is 0" in ready["message"]
