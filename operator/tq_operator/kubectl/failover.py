"""``kubectl tq failover`` and ``drain``: what is done to the pods of a running queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.kubectl.access import Access, condition, is_ready, pod_named
from tq_operator.kubectl.streams import execute
from tq_operator.plan.children import empties_units
from tq_operator.plan.queue import Manifest, queue_from
from tq_operator.plan.settings import CONFIG_DIRECTORY
from transfer_queue.errors import ConfigError, TransferQueueError, WaitTimeoutError

__all__ = ["drain", "fail_over"]

_LOOK_S = 0.5
_GROUP = "mooncake-masters"


def fail_over(
    access: Access,
    document: Manifest,
    part: str,
    *,
    timeout_s: float,
    allow_data_loss: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> tuple[str, str]:
    """Delete the pod of ``part``, of several masters that of the leader; wait until another serves and all is Ready.

    Returns the names of the old and the new pod. ``force``: do not wait for the node of the old one, which is gone.
    Raises ConfigError if the queue has no such part or rows would be lost, WaitTimeoutError.
    """
    name = document["metadata"]["name"]
    if not allow_data_loss:
        _check_rows(document, part)
    pods = access.pods(name, part)
    if not pods:
        raise ConfigError(f"queue {name} has no pod of the part {part}; kubectl tq status {name} shows which it has")
    leader = (document.get("status") or {}).get("leader")
    chosen = [pod for pod in pods if part == _GROUP and pod["metadata"]["name"] == leader]
    old = next((pod for pod in [*chosen, *pods] if is_ready(pod)), pods[0])["metadata"]
    wanted = len(pods)
    options: dict[str, Any] = {"preconditions": {"uid": old["uid"]}, **({"gracePeriodSeconds": 0} if force else {})}
    try:
        access.cluster.call("DELETE", f"/api/v1/namespaces/{access.namespace}/pods/{old['name']}", options)
    except (NotFoundError, ConflictError):
        raise TransferQueueError(
            f"pod {old['name']} was replaced by somebody else meanwhile; nothing was done"
        ) from None
    progress(f"deleted {old['name']}")
    deadline = time.monotonic() + timeout_s
    while True:
        pods = access.pods(name, part)
        fresh = [pod["metadata"]["name"] for pod in pods if is_ready(pod) and pod["metadata"]["uid"] != old["uid"]]
        gone = all(pod["metadata"]["uid"] != old["uid"] for pod in pods)
        now = access.queue(name)
        ready, words = _ready(now)
        whole = len(fresh) >= wanted
        if whole and gone and ready:
            return str(old["name"]), str(now["status"]["leader"] if part == _GROUP else fresh[0])
        missing = words if whole and gone else f"pod {old['name']} still ends" if not gone else "no new pod is ready"
        progress(missing)
        if time.monotonic() > deadline:
            advice = "kubectl tq doctor says what is wrong"
            if not gone:
                advice = "if its node is gone, call again with --force"
            raise WaitTimeoutError(f"not Ready again within {timeout_s:g} s: {missing}; {advice}")
        time.sleep(_LOOK_S)


def _ready(document: Manifest) -> tuple[bool, str]:
    ready = condition(document, "Ready")
    if not ready:
        return False, "the operator has not looked at the queue"
    return ready["status"] == "True", ready.get("message", "")


def _check_rows(document: Manifest, part: str) -> None:
    """Rows end with the pod, except those of a controller whose journal lies on a volume, and of masters whose log lies
    in etcd."""
    queue = queue_from(document)
    if part == _GROUP or (part == "controller" and queue.spec.controller.durability == "node"):
        return
    used = ((document.get("status") or {}).get("storage") or {}).get("used")
    if used == "0":
        return
    held = "is not known to be empty" if used is None else f"holds {used} of rows"
    keep = " (spec.controller.durability: node would keep them)" if part == "controller" else ""
    raise ConfigError(
        f"queue {queue.name} {held}, which end with the pod of its {part}{keep}; wait until it is empty, or give them "
        "up with --allow-data-loss"
    )


def drain(
    access: Access,
    document: Manifest,
    unit: str,
    *,
    timeout_s: float,
    cancel: bool,
    progress: Callable[[str], None] = lambda words: None,
) -> str:
    """Move the rows of a storage unit to the others, by the program that its pod runs before it stops.

    Returns the last words of that program. Raises ConfigError for an unknown unit and for backends whose units cannot
    be emptied from within, TransferQueueError with what the program said.
    """
    queue = queue_from(document)
    if not empties_units(queue):
        raise ConfigError(
            f"storage pods of the backend {queue.spec.backend.kind} have no room for the buffers of a drain; run "
            f"tq drain {unit} in a pod that uses the queue"
        )
    pod = pod_named(access.pods(queue.name, "storage"), unit, "storage unit")
    if not is_ready(pod):
        raise ConfigError(f"storage unit {unit} is not ready; kubectl tq doctor {queue.name} says why")
    command = ["python3", "-m", "transfer_queue.client.draining", "--config", f"{CONFIG_DIRECTORY}/storage.yaml"]
    command += ["--cancel"] if cancel else ["--timeout", f"{timeout_s:g}"]
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        progress(line)

    code = execute(access, unit, "storage", command, hear)
    last = heard[-1] if heard else f"exit code {code}"
    if code != 0:
        raise TransferQueueError(f"storage unit {unit}: {last}")
    return last
