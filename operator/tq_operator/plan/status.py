"""What is observed of the children -> the status of the queue. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tq_operator.api.status import Condition, Endpoints, LastCheckpoint, PartStatus, Status, StorageStatus
from tq_operator.plan.children import drains, uses_storage_units
from tq_operator.plan.masters import ready_etcd, runs_etcd
from tq_operator.plan.names import selector
from tq_operator.plan.pods import ready_pods
from tq_operator.plan.problems import Problem, worst_problem
from tq_operator.plan.queue import RESTORED, Manifest, Queue
from transfer_queue.config.quantity import Quantity
from transfer_queue.config.running import CheckpointReport

__all__ = ["MasterGroup", "Observation", "Problem", "known_use", "master_problem", "queue_status", "refused_status"]


@dataclass(frozen=True)
class MasterGroup:
    """What the running masters with high availability say. ``leader``: name of the pod that serves, empty if none does.
    ``etcd``: why etcd cannot be reached, empty if it can."""

    leader: str = ""
    etcd: str = ""


@dataclass(frozen=True)
class Observation:
    """What there is in the cluster. ``children`` by (kind, name); ``used`` in bytes, None if unknown."""

    children: Mapping[tuple[str, str], Manifest] = field(default_factory=dict)
    pods: Sequence[Manifest] = ()
    injected: int = 0
    users: frozenset[str] = frozenset()
    """Namespaces of the pods that were given the queue."""
    used: int | None = None
    drained: frozenset[str] = frozenset()
    """Storage units that have no rows and get none."""
    problems: Sequence[Problem] = ()
    """What went wrong while the children were written."""
    held: str = ""
    """Why writes wait."""
    masters: MasterGroup | None = None
    """None as long as no master of a group runs."""
    checkpoint: CheckpointReport | None = None
    """What the process that restores and saves the queue says; None if it does not answer."""


def queue_status(queue: Queue, seen: Observation, previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """The status as plain data. ``now``: RFC 3339; conditions that stay keep their time."""
    parts = _parts(queue, seen)
    problem = seen.problems[0] if seen.problems else worst_problem(seen.children.values(), seen.pods)
    decided = queue.decided
    if problem is None and decided and decided.reason == "RdmaUnavailable":
        problem = Problem(decided.reason, decided.message)
    unled = master_problem(queue, seen)
    problem = problem or unled
    last = _last_checkpoint(queue, seen, previous)
    if problem is None and last and last.error:
        problem = Problem("CheckpointFailed", last.error)
    restored = _restored(queue, seen, previous)
    # With a conflict, the pods that are ready may be those of somebody else.
    conflict = next((found for found in seen.problems if found.reason == "NameConflict"), None)
    astray = conflict or _unreachable(queue, seen, parts)
    conditions = _conditions(parts, problem, seen.held, _leaving(queue, seen), unled, astray, restored)
    if queue.high_availability and seen.masters:
        words = f"{seen.masters.leader} leads; the others follow it."
        serving = ("False", unled.reason, unled.message) if unled else ("True", "Leader", words)
        conditions.append(("MasterServing", *serving))
    if decided and decided.available:
        conditions.append(("RdmaAvailable", decided.available, decided.reason, decided.message))
    if restored:
        conditions.append(restored)
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
        endpoints=_endpoints(queue, seen),
        controller=parts["controller"],
        master=parts.get("mooncake-master") or parts.get("mooncake-masters"),
        leader=seen.masters.leader or None if seen.masters else None,
        storage=StorageStatus(
            replicas=storage.replicas,
            ready=storage.ready,
            summary=storage.summary,
            selector=",".join(f"{key}={value}" for key, value in selector(queue.name, "storage").items()),
            capacity=_readable(queue.spec.unit_capacity * storage.replicas) if storage.summary else None,
            used=known_use(queue, seen, previous),
        ),
        transport=queue.transport,
        tls=queue.tls,
        last_checkpoint=last,
        injected=seen.injected,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def _parts(queue: Queue, seen: Observation) -> dict[str, PartStatus]:
    parts = {
        "controller": _part(seen, "Deployment", queue.child("controller"), queue.spec.controller.replicas),
        "storage": _part(seen, "StatefulSet", queue.child("storage"), queue.spec.storage.replicas),
    }
    if group := queue.high_availability:
        parts["mooncake-masters"] = _part(seen, "StatefulSet", queue.child("mooncake-masters"), group.masters)
    elif queue.spec.backend.mooncake:
        parts["mooncake-master"] = _part(seen, "StatefulSet", queue.child("mooncake-master"), 1)
    if runs_etcd(queue):
        parts["etcd"] = _part(seen, "StatefulSet", queue.child("etcd"), 1)
        if seen.pods and ready_etcd(queue, seen.pods) is None:
            # The StatefulSet may be seen before its pod, which tells whether the log of the masters is lost.
            parts["etcd"] = PartStatus(replicas=1, summary="0/1")
    if not uses_storage_units(queue):
        parts["storage"] = PartStatus()
    return parts


def _last_checkpoint(queue: Queue, seen: Observation, previous: Mapping[str, Any]) -> LastCheckpoint | None:
    """The report of the process that saves the queue. While it does not answer, the last report stays."""
    before = LastCheckpoint.model_validate(previous.get("lastCheckpoint") or {})
    if seen.checkpoint and (last := seen.checkpoint.last):
        found = {name: value for name, value in msgspec.structs.asdict(last).items() if value not in ("", None)}
        return LastCheckpoint(**found) if last.url else before.model_copy(update={"error": last.error or None})
    return before if previous.get("lastCheckpoint") and queue.spec.checkpoint else None


def _restored(queue: Queue, seen: Observation, previous: Mapping[str, Any]) -> tuple[str, Any, str, str] | None:
    """The condition Restored, which does not change once the outcome of restoreFrom is known."""
    if queue.spec.restore_from is None:
        return None
    if queue.restored:
        last = next(entry for entry in previous["conditions"] if entry["type"] == RESTORED)
        return RESTORED, last["status"], last["reason"], last["message"]
    if seen.checkpoint is None or seen.checkpoint.restored is None:
        return RESTORED, "Unknown", "RestorePending", f"{queue.spec.restore_from} is to be loaded."
    done = seen.checkpoint.restored
    return RESTORED, *(("True", "Restored") if done.loaded else ("False", "NotRestored")), done.message


def known_use(queue: Queue, seen: Observation, previous: Mapping[str, Any]) -> str | None:
    """``status.storage.used``: as the controller says, and while it says nothing as it said last, unless the rows are
    gone: with the last storage unit, or with a controller that has no journal. None if unknown."""
    if seen.used is not None:
        return _readable(seen.used)
    storage = seen.children.get(("StatefulSet", queue.child("storage")), {})
    found = _controller_lives(queue, seen) or queue.spec.controller.durability != "none"
    held = bool(storage.get("spec", {}).get("replicas", 1) or storage.get("status", {}).get("replicas"))
    last: str | None = (previous.get("storage") or {}).get("used")
    return last if found and held and uses_storage_units(queue) else None


def _controller_lives(queue: Queue, seen: Observation) -> bool:
    """One that is too busy to say that it is ready has its rows."""
    deployment = seen.children.get(("Deployment", queue.child("controller")), {})
    chosen = selector(queue.name, "controller").items()
    pods = [pod for pod in seen.pods if chosen <= pod["metadata"].get("labels", {}).items()]
    containers = [entry for pod in pods for entry in pod.get("status", {}).get("containerStatuses", [])]
    running = any("running" in entry.get("state", {}) for entry in containers)
    return running or bool(deployment.get("status", {}).get("readyReplicas"))


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
    # Without it the queue would be loaded again once its spec is valid.
    listed += [entry for entry in previous.get("conditions", []) if entry["type"] == RESTORED]
    return {**previous, "observedGeneration": generation, "conditions": listed}


def _part(seen: Observation, kind: str, name: str, replicas: int) -> PartStatus:
    child = seen.children.get((kind, name), {})
    if seen.held and child:  # what is wanted is not asked for yet
        replicas = child["spec"].get("replicas", 1)
    # Pods of an older template do not count: after a change the new ones have to prove themselves.
    ready = min(ready_pods(child), replicas)
    return PartStatus(replicas=replicas, ready=ready, summary=f"{ready}/{replicas}")


def _unreachable(queue: Queue, seen: Observation, parts: Mapping[str, PartStatus]) -> Problem | None:
    """Why clients do not reach ready pods: their Service is missing or selects other pods."""
    for part in (name for name, status in parts.items() if status.ready):
        name = queue.child(part)
        workload = seen.children.get(("Deployment", name)) or seen.children.get(("StatefulSet", name)) or {}
        labels = workload.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {})
        service = seen.children.get(("Service", name))
        if service is None:
            return Problem("NoEndpoints", f"Service {name} does not exist, so clients do not find the pods of {part}.")
        if not service["spec"].get("selector", {}).items() <= labels.items():
            words = f"Service {name} selects no pod of {part}; remove what was added to its spec.selector."
            return Problem("NoEndpoints", words)
    return None


def _leaving(queue: Queue, seen: Observation) -> list[str]:
    """Storage pods that move their rows to the others, and then stop."""
    if not drains(queue):
        return []
    ending = [pod["metadata"] for pod in seen.pods if "deletionTimestamp" in pod["metadata"]]
    prefix = queue.child("storage") + "-"
    return sorted(metadata["name"] for metadata in ending if metadata["name"].startswith(prefix))


def master_problem(queue: Queue, seen: Observation) -> Problem | None:
    """Why none of several masters serves; None if one does, or none runs yet."""
    if seen.masters is None or seen.masters.leader:
        return None
    members = ", ".join(queue.etcd_members)
    if seen.masters.etcd:
        words = f"The masters cannot agree on a leader: etcd at {members} does not answer ({seen.masters.etcd})."
        own = runs_etcd(queue)
        advice = f"Look at the pod {queue.child('etcd')}-0." if own else "Start it, or correct etcd.endpoints."
        return Problem("EtcdUnreachable", f"{words} {advice}")
    words = "No master serves: they are choosing a leader, which takes about 10 s after the last one was lost."
    return Problem("NoLeader", words)


def _conditions(
    parts: Mapping[str, PartStatus],
    problem: Problem | None,
    held: str,
    leaving: Sequence[str],
    unled: Problem | None,
    astray: Problem | None,
    restored: tuple[str, Any, str, str] | None,
) -> list[tuple[str, Any, str, str]]:
    missing = [f"{name} {part.summary}" for name, part in parts.items() if part.ready < part.replicas]
    if unled:
        missing.append("a leader of the masters")
    reason = "PodsNotReady"
    if restored and restored[1] == "Unknown":
        reason = reason if missing else restored[2]
        missing.append("the restore")
    waiting = f"Not ready yet: {', '.join(missing)}."
    if missing:
        reason = problem.reason if problem else reason
        ready = ("Ready", "False", reason, f"{waiting} {problem.message}" if problem else waiting)
    elif none := [name for name, part in parts.items() if part.summary and not part.replicas]:
        words = f"There is no {' and no '.join(none)}: spec.{none[0]}.replicas is 0, so nothing can be put."
        ready = ("Ready", "False", "NoReplicas", words)
    elif astray:
        ready = ("Ready", "False", astray.reason, astray.message)
    else:
        ready = ("Ready", "True", "AllReady", "All parts are ready.")
    if held:
        progress = ("Progressing", "False", "Held", held)
    elif leaving:
        words = f"The rows of {', '.join(leaving)} are moved to the other storage units."
        progress = ("Progressing", "True", "Draining", words)
    elif missing:
        progress = ("Progressing", "True", "PodsNotReady", waiting)
    else:
        progress = ("Progressing", "False", "Complete", "")
    return [
        ready,
        progress,
        ("Degraded", "True", problem.reason, problem.message) if problem else ("Degraded", "False", "AsExpected", ""),
    ]


def _since(previous: Mapping[str, Any], kind: str, value: str, now: str) -> str:
    for condition in previous.get("conditions", []):
        if condition.get("type") == kind and condition.get("status") == value:
            return str(condition.get("lastTransitionTime", now))
    return now


def _endpoints(queue: Queue, seen: Observation) -> Endpoints:
    mooncake, controller = queue.spec.backend.mooncake, ",".join(queue.controller_addresses)
    if queue.high_availability:
        etcd = f"etcd://{';'.join(queue.etcd_members)}"
        return Endpoints(controller=controller, mooncake_master=etcd, metadata_server=etcd)
    host = queue.host("mooncake-master")
    made = seen.children.get(("Service", queue.child("mooncake-master")))  # none with IPv6: masters._single
    metadata = made is None or any(port.get("name") == "http-metadata" for port in made["spec"].get("ports", []))
    return Endpoints(
        controller=controller,
        mooncake_master=f"{host}:{mooncake.master.rpc_port}" if mooncake else None,
        metadata_server=(
            f"http://{host}:{mooncake.master.http_metadata_port}/metadata" if mooncake and metadata else None
        ),
    )


def _readable(size: int) -> str:
    for suffix in ("Ti", "Gi", "Mi", "Ki"):
        unit = Quantity(f"1{suffix}")
        if size >= unit:
            return f"{size / unit:.1f}".rstrip("0").rstrip(".") + suffix
    return str(size)
