"""What is observed of the children -> the status of the queue. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tq_operator.api.status import Condition, Endpoints, PartStatus, Status, StorageStatus
from tq_operator.plan.children import uses_storage_units
from tq_operator.plan.names import selector
from tq_operator.plan.queue import Manifest, Queue
from transfer_queue.config.quantity import Quantity

__all__ = ["Observation", "Problem", "queue_status", "refused_status"]


@dataclass(frozen=True)
class Problem:
    """Why something does not work: a reason in one word, and words a person can act on."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observation:
    """What there is in the cluster. ``children`` by (kind, name); ``used`` in bytes, None if unknown."""

    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: Sequence[Manifest] = ()
    injected: int = 0
    used: int | None = None
    problems: Sequence[Problem] = ()
    """What went wrong while the children were written."""


def queue_status(queue: Queue, seen: Observation, previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """The status as plain data. ``now``: RFC 3339; conditions that stay keep their time."""
    parts = {
        "controller": _part(seen, "Deployment", queue.child("controller"), queue.spec.controller.replicas),
        "storage": _part(seen, "StatefulSet", queue.child("storage"), queue.spec.storage.replicas),
        "mooncake-master": _part(seen, "StatefulSet", queue.child("mooncake-master"), 1),
    }
    if not queue.spec.backend.mooncake:
        del parts["mooncake-master"]
    if not uses_storage_units(queue):
        parts["storage"] = PartStatus()
    problem = _worst(queue, seen)
    conditions = _conditions(parts, problem)
    storage = parts["storage"]
    status = Status(
        observed_generation=queue.generation,
        backend=queue.spec.backend.kind,
        conditions=[
            Condition(
                type=kind,
                status=value,
                reason=reason,
                message=message,
                last_transition_time=_since(previous, kind, value, now),
                observed_generation=queue.generation,
            )
            for kind, value, reason, message in conditions
        ],
        endpoints=_endpoints(queue),
        controller=parts["controller"],
        master=parts.get("mooncake-master"),
        storage=StorageStatus(
            replicas=storage.replicas,
            ready=storage.ready,
            summary=storage.summary,
            selector=",".join(f"{key}={value}" for key, value in selector(queue.name, "storage").items()),
            capacity=_readable(queue.spec.unit_capacity * storage.replicas) if storage.summary else None,
            used=_readable(seen.used) if seen.used is not None else None,
        ),
        injected=seen.injected,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def refused_status(generation: int, message: str, previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """Status of a queue whose spec is not valid: only what is wrong with it changes."""
    conditions = [
        ("Ready", "False", "InvalidSpec", message),
        ("Progressing", "False", "InvalidSpec", "Waiting for a valid spec."),
        ("Degraded", "True", "InvalidSpec", message),
    ]
    listed = [
        {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": text,
            "lastTransitionTime": _since(previous, kind, value, now),
            "observedGeneration": generation,
        }
        for kind, value, reason, text in conditions
    ]
    return {**previous, "observedGeneration": generation, "conditions": listed}


def _part(seen: Observation, kind: str, name: str, replicas: int) -> PartStatus:
    child = seen.children.get((kind, name), {})
    status = child.get("status", {})
    # Pods of an older template do not count: after a change the new ones have to prove themselves.
    current = status.get("observedGeneration", 0) >= child.get("metadata", {}).get("generation", 1)
    updated = status.get("updatedReplicas", status.get("currentReplicas", 0))
    ready = min(status.get("readyReplicas", 0), updated, replicas) if current else 0
    return PartStatus(replicas=replicas, ready=ready, summary=f"{ready}/{replicas}")


def _conditions(parts: Mapping[str, PartStatus], problem: Problem | None) -> list[tuple[str, Any, str, str]]:
    missing = [f"{name} {part.summary}" for name, part in parts.items() if part.ready < part.replicas]
    waiting = f"Not ready yet: {', '.join(missing)}."
    if missing:
        reason = problem.reason if problem else "PodsNotReady"
        ready = ("Ready", "False", reason, f"{waiting} {problem.message}" if problem else waiting)
    else:
        ready = ("Ready", "True", "AllReady", "All parts are ready.")
    return [
        ready,
        ("Progressing", "True", "PodsNotReady", waiting) if missing else ("Progressing", "False", "Complete", ""),
        ("Degraded", "True", problem.reason, problem.message) if problem else ("Degraded", "False", "AsExpected", ""),
    ]


def _since(previous: Mapping[str, Any], kind: str, value: str, now: str) -> str:
    for condition in previous.get("conditions", []):
        if condition.get("type") == kind and condition.get("status") == value:
            return str(condition.get("lastTransitionTime", now))
    return now


def _endpoints(queue: Queue) -> Endpoints:
    mooncake = queue.spec.backend.mooncake
    host = queue.host("mooncake-master")
    return Endpoints(
        controller=queue.controller_address,
        mooncake_master=f"{host}:{mooncake.master.rpc_port}" if mooncake else None,
        metadata_server=f"http://{host}:{mooncake.master.http_metadata_port}/metadata" if mooncake else None,
    )


def _worst(queue: Queue, seen: Observation) -> Problem | None:
    """The problem to tell about: the root comes before what follows from it."""
    if seen.problems:
        return seen.problems[0]
    order = {"mooncake-master": 0, "controller": 1, "storage": 2}
    pods = sorted(
        seen.pods,
        key=lambda pod: (
            order.get(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""), 3),
            pod["metadata"]["name"],
        ),
    )
    for pod in pods:
        if problem := _pod_problem(pod):
            return problem
    for child in seen.children.values():
        if problem := _rollout_problem(child):
            return problem
    return None


def _pod_problem(pod: Manifest) -> Problem | None:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
        reason = waiting.get("reason", "")
        if ended.get("reason") == "OOMKilled" and not container.get("ready"):
            return Problem("OutOfMemory", f"Pod {name} was killed for using more memory than its limit; raise it.")
        if ended.get("exitCode", 0) != 0 and not container.get("ready"):
            words = _last_line(ended.get("message", "")) or f"exit code {ended['exitCode']} and no message"
            return Problem("CrashLooping", f"Pod {name} ended {container.get('restartCount', 0)} times, last: {words}")
        if reason in {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}:
            detail = waiting.get("message", reason)
            return Problem("ImagePullFailed", f"Pod {name} cannot get image {container.get('image')}: {detail}")
        if reason in {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}:
            return Problem("ContainerNotCreated", f"Pod {name}: {waiting.get('message', reason)}")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = condition.get("message", "no node fits")
            rdma = "rdma" in message.lower()
            return Problem("RdmaUnavailable" if rdma else "Unschedulable", f"Pod {name} has no node: {message}")
    return None


def _rollout_problem(child: Manifest) -> Problem | None:
    for condition in child.get("status", {}).get("conditions", []):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return Problem(
                "PodsRefused", f"{child['kind']} {child['metadata']['name']}: {condition.get('message', '')}"
            )
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""


def _readable(size: int) -> str:
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        unit = Quantity(f"1{suffix}")
        if size >= unit:
            return f"{size / unit:.1f}".rstrip("0").rstrip(".") + suffix
    return str(size)
