"""What does not work, in words a person can act on. Pure: from pods and children as the apiserver shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tq_operator.plan.queue import Manifest

__all__ = ["Problem", "refusal", "worst_problem"]


@dataclass(frozen=True)
class Problem:
    """Why something does not work: a reason in one word, and words a person can act on."""

    reason: str
    message: str


def refusal(what: str, message: str, otherwise: str = "ApplyFailed") -> Problem:
    """What the apiserver said when it refused to make ``what``; ``otherwise``: the reason if no better one is known."""
    if "exceeded quota" in message:
        advice = "raise the ResourceQuota of the namespace or lower the requests of the queue"
        return Problem("QuotaExceeded", f"{what}: {message}; {advice}.")
    if "is forbidden" in message and "cannot" in message:
        return Problem("MissingRights", f"{what}: {message}; the role of the operator lacks this right.")
    return Problem(otherwise, f"{what}: {message}")


def worst_problem(children: Iterable[Manifest], parts: Iterable[Manifest]) -> Problem | None:
    """The problem to tell about, of children and pods: the root comes before what follows from it."""
    order = {"etcd": 0, "mooncake-master": 1, "mooncake-masters": 1, "controller": 2, "storage": 3}
    pods = sorted(
        parts,
        key=lambda pod: (
            order.get(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""), 4),
            pod["metadata"]["name"],
        ),
    )
    for pod in pods:
        if problem := _pod_problem(pod):
            return problem
    for child in children:
        if problem := _rollout_problem(child):
            return problem
    return None


def _pod_problem(pod: Manifest) -> Problem | None:
    status = pod.get("status", {})
    pod_name, containers = pod["metadata"]["name"], status.get("containerStatuses", [])
    for container in containers:
        name = pod_name if len(containers) == 1 else f"{pod_name}/{container['name']}"
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
            # The only resource claims of a queue's own pods are for RDMA devices.
            rdma = "rdma" in message.lower() or "cannot allocate all claims" in message
            return Problem("RdmaUnavailable" if rdma else "Unschedulable", f"Pod {pod_name} has no node: {message}")
    return None


def _rollout_problem(child: Manifest) -> Problem | None:
    for condition in child.get("status", {}).get("conditions", []):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return refusal(f"{child['kind']} {child['metadata']['name']}", condition.get("message", ""), "PodsRefused")
    return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""
