"""``kubectl tq status``: conditions, parts with their pods, endpoints, storage, bindings."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from tq_operator.kubectl.access import Access, is_ready, part_of
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.cli.output import line, make_table

__all__ = ["bindings_of", "draw_overview", "overview", "pod_summary", "restarts"]


def overview(access: Access, queue: Manifest) -> dict[str, Any]:
    """The state of a queue as plain data."""
    metadata, status = queue["metadata"], queue.get("status") or {}
    pods = [pod_summary(pod) for pod in access.pods(metadata["name"])]
    group = (queue["spec"]["backend"].get("mooncake") or {}).get("highAvailability")
    master = "mooncake-masters" if group else "mooncake-master"
    reported = {
        "controller": "controller",
        "storage": "storage",
        master: "master",
        "etcd": "etcd",
        "checkpoint": "checkpoint",
    }
    parts = []
    for part, key in reported.items():
        own = [pod for pod in pods if pod["part"] == part]
        counts = status.get(key) or {"ready": sum(pod["ready"] for pod in own), "replicas": len(own)}
        if own or counts.get("replicas"):
            ready, wanted = counts.get("ready", 0), counts.get("replicas", 0)
            parts.append({"part": part, "ready": ready, "replicas": wanted, "pods": own})
    storage = status.get("storage") or {}
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "backend": status.get("backend", ""),
        "transport": status.get("transport", ""),
        "generation": metadata.get("generation", 0),
        "observedGeneration": status.get("observedGeneration", 0),
        "conditions": status.get("conditions", []),
        "parts": parts,
        "leader": status.get("leader"),
        "endpoints": status.get("endpoints", {}),
        "storage": {name: storage.get(name) for name in ("ready", "replicas", "used", "capacity")},
        "lastCheckpoint": status.get("lastCheckpoint"),
        "injected": status.get("injected", 0),
        "bindings": bindings_of(access, metadata["namespace"], metadata["name"]),
    }


def pod_summary(pod: Manifest) -> dict[str, Any]:
    """What a person wants to know of a pod."""
    metadata, status = pod["metadata"], pod.get("status", {})
    return {
        "part": part_of(pod),
        "name": metadata["name"],
        "node": pod.get("spec", {}).get("nodeName"),
        "address": status.get("podIP"),
        "phase": "Terminating" if "deletionTimestamp" in metadata else status.get("phase", "Unknown"),
        "ready": is_ready(pod),
        "restarts": restarts(pod),
        "created": metadata.get("creationTimestamp"),
    }


def restarts(pod: Manifest) -> int:
    return sum(each.get("restartCount", 0) for each in pod.get("status", {}).get("containerStatuses", []))


def bindings_of(access: Access, namespace: str, queue: str) -> list[dict[str, Any]]:
    """The bindings to a queue: of all namespaces, of its own where the others may not be read."""
    try:
        documents = access.cluster.bindings([])
    except ClusterError:
        documents = access.cluster.bindings([namespace])
    found = []
    for document in documents:
        if document["spec"]["queue"] != {"name": queue, "namespace": namespace}:
            continue
        condition: dict[str, Any] = next(iter((document.get("status") or {}).get("conditions", [])), {})
        found.append(
            {
                "namespace": document["metadata"]["namespace"],
                "name": document["metadata"]["name"],
                "bound": condition.get("status", "Unknown"),
                "reason": condition.get("reason", ""),
                "message": condition.get("message", ""),
            }
        )
    return found


def draw_overview(seen: dict[str, Any]) -> Sequence[Any]:
    """As tables."""
    head = f"{seen['name']} in {seen['namespace']}   {seen['backend'] or 'not looked at yet'}   {seen['transport']}"
    parts: list[Any] = [line(head.rstrip(), "bold")]
    if seen["observedGeneration"] < seen["generation"]:
        text = f"the operator has taken up generation {seen['observedGeneration']} of {seen['generation']}"
        parts.append(line(text, "yellow"))
    conditions = [
        [each["type"], each["status"], each["reason"], _age(each.get("lastTransitionTime")), each.get("message", "")]
        for each in seen["conditions"]
    ]
    if conditions:
        parts += ["", make_table(["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"], conditions)]
    pods = [
        [
            each["part"],
            f"{each['ready']}/{each['replicas']}",
            pod["name"],
            pod["phase"] + ("" if pod["ready"] else ", not ready"),
            pod["restarts"],
            pod["node"] or "-",
            pod["address"] or "-",
            _age(pod["created"]),
        ]
        for each in seen["parts"]
        for pod in each["pods"]
    ]
    pods += [
        [each["part"], f"{each['ready']}/{each['replicas']}", "no pod yet", "", "", "-", "-", ""]
        for each in seen["parts"]
        if not each["pods"]
    ]
    if pods:
        parts += ["", make_table(["PART", "READY", "POD", "PHASE", "RESTARTS", "NODE", "ADDRESS", "AGE"], pods)]
    if seen["leader"]:
        parts.append(line(f"{seen['leader']} leads the masters"))
    if seen["endpoints"]:
        parts += ["", make_table(["ENDPOINT", "ADDRESS"], [[*item] for item in seen["endpoints"].items()])]
    storage = seen["storage"]
    if storage["capacity"]:
        units = f"{storage['ready'] or 0} of {storage['replicas']} storage units ready"
        parts += ["", line(f"{units}, {storage['used'] or 'an unknown part'} of {storage['capacity']} used")]
    if last := seen["lastCheckpoint"]:
        saved = f"last checkpoint {_age(last['time'])} ago: {last['rows']} rows, {last['url']}" if "url" in last else ""
        parts.append(line("; ".join(filter(None, (saved, last.get("error"))))))
    parts.append(line(f"{seen['injected']} pods were given the queue"))
    if seen["bindings"]:
        rows = [[each[key] for key in ("namespace", "name", "bound", "reason")] for each in seen["bindings"]]
        parts += ["", make_table(["NAMESPACE", "BINDING", "BOUND", "REASON"], rows)]
    return parts


def _age(stamp: str | None) -> str:
    """How long ago, as kubectl shows it: the largest whole unit."""
    if not stamp:
        return ""
    passed = datetime.now(timezone.utc) - datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    seconds = max(0, int(passed.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
