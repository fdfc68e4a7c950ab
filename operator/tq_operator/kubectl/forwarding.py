"""Which pod and which of its ports are forwarded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tq_operator.kubectl.access import Access, is_ready, pod_named
from tq_operator.plan.queue import Manifest
from transfer_queue.errors import ConfigError, TransferQueueError

__all__ = ["Port", "choose_ports", "find_pod", "is_controller_port"]


class Port(NamedTuple):
    """``local`` 0: any free port."""

    name: str
    remote: int
    local: int


def find_pod(access: Access, queue: str, part: str, name: str | None = None) -> Manifest:
    """A ready pod of the part, or the one of that name. Raises TransferQueueError if there is none."""
    pods = access.pods(queue, part)
    if name is not None:
        pods = [pod_named(pods, name, part)]
    for pod in pods:
        if is_ready(pod):
            return pod
    names = ", ".join(pod["metadata"]["name"] for pod in pods) or "none"
    raise TransferQueueError(
        f"no ready pod of the {part} of queue {queue}; its pods: {names}. kubectl tq doctor {queue} says what is wrong"
    )


def is_controller_port(name: str) -> bool:
    """Whether clients attach to the port of that name of the controller's pod. Each shard has one, in their order."""
    return re.fullmatch(r"transferqueue|shard-\d+", name) is not None


def choose_ports(pod: Manifest, wanted: Sequence[str]) -> list[Port]:
    """``[LOCAL:]PORT`` each, PORT a name or number; all ports of the pod if none is wanted. Raises ConfigError."""
    declared = {
        str(port.get("name") or port["containerPort"]): int(port["containerPort"])
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    }
    chosen = []
    for text in wanted or declared:
        local, colon, remote = text.rpartition(":")
        name = next((key for key, number in declared.items() if remote in (key, str(number))), None)
        if name is None or (local and not local.isdigit()) or (local and int(local) > 65535):
            known = ", ".join(f"{key} ({number})" for key, number in declared.items())
            raise ConfigError(
                f"{text!r} is no port of {pod['metadata']['name']}; write [LOCAL:]PORT with one of: {known}"
            )
        number = declared[name]
        chosen.append(Port(name, number, int(local) if local else 0 if colon else number))
    return chosen
