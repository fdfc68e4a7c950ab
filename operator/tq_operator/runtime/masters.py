"""Which of several masters leads, asked from their HTTP ports; and if none does, whether their etcd answers."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tq_operator.plan.masters import runs_etcd
from tq_operator.plan.queue import Manifest, Queue
from tq_operator.plan.status import MasterGroup, Observation
from tq_operator.runtime.fetch import fetch
from transfer_queue.config.attach import join_address

__all__ = ["master_group", "runs"]

_LONGEST = 200
"""Characters of what an etcd says that the status shows."""


def master_group(queue: Queue, seen: Observation) -> MasterGroup | None:
    """Blocking. None for a queue with one master, and while no master runs."""
    if queue.high_availability is None or queue.spec.backend.mooncake is None:
        return None
    prefix, port = queue.child("mooncake-masters") + "-", queue.spec.backend.mooncake.master.metrics_port
    running = [pod for pod in seen.pods if pod["metadata"]["name"].startswith(prefix) and runs(pod)]
    for pod in running:
        if _ask(f"http://{join_address(pod['status']['podIP'], port)}/health").get("service_ready") is True:
            return MasterGroup(leader=pod["metadata"]["name"])
    return MasterGroup(etcd=_etcd_problem(queue, seen)) if running else None


def runs(pod: Manifest) -> bool:
    """Whether the pod has an address and a running container."""
    containers = pod.get("status", {}).get("containerStatuses", [])
    return "podIP" in pod.get("status", {}) and any("running" in entry.get("state", {}) for entry in containers)


def _etcd_problem(queue: Queue, seen: Observation) -> str:
    if runs_etcd(queue):
        child = seen.children.get(("StatefulSet", queue.child("etcd")), {})
        return "" if child.get("status", {}).get("readyReplicas") else "its pod is not ready"
    problem = ""
    for member in queue.etcd_members:
        answer = _ask(f"http://{member}/health")
        if answer.get("health") in ("true", True):
            return ""
        why = str(answer.get("error") or answer.get("reason") or "not healthy")
        problem = problem or f"{member}: {why[:_LONGEST]}"
    return problem


def _ask(url: str) -> dict[str, Any]:
    """The JSON object at ``url``; its ``error`` says why there is none."""
    try:
        _, body = fetch(url)  # etcd without a quorum says so with 503
        found = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": str(error)}
    return found if isinstance(found, dict) else {"error": f"answers {found!r}"}
