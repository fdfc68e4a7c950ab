"""Names and labels of the children of a queue."""

from __future__ import annotations

import hashlib
import re

from transfer_queue.config.defaults import GROUP

__all__ = [
    "INJECTED_ANNOTATION",
    "INJECT_LABEL",
    "MANAGED_BY",
    "MANAGER",
    "QUEUE_ANNOTATION",
    "QUEUE_LABEL",
    "child_name",
    "controller_name",
    "digest",
    "is_controller",
    "label_value",
    "labels",
    "selector",
]

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "transferqueue-operator"
"""Field manager, and the value of the managed-by label."""
QUEUE_LABEL = f"{GROUP}/queue"
QUEUE_ANNOTATION = f"{GROUP}/queue"
"""The queue's full name: a label holds only 63 characters."""
INJECT_LABEL = f"{GROUP}/inject"
INJECTED_ANNOTATION = f"{GROUP}/injected"

# A StatefulSet's name gets "-" and a hash of 10 characters appended in a label of its pods, which holds 63.
_LONGEST = 52


def child_name(queue: str, part: str) -> str:
    """``queue-part``, made to fit where a DNS label is wanted: shortened with a hash rather than refused."""
    name = f"{queue}-{part}"
    if len(name) <= _LONGEST and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", queue).strip("-")
    plain = plain if plain[:1].isalpha() else f"tq-{plain}"
    tail = f"-{digest(queue)}-{part}"
    return plain[: _LONGEST - len(tail)].rstrip("-") + tail


def controller_name(shard: int, shards: int) -> str:
    """Of the container of a controller, and of its file."""
    return "controller" if shards == 1 else f"controller-{shard}"


def is_controller(container: str) -> bool:
    """Whether a container of that name is a controller."""
    return re.fullmatch(r"controller(-\d+)?", container) is not None


def digest(text: str, length: int = 8) -> str:
    """A short hash, for names and for noticing changes."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def label_value(name: str) -> str:
    """``name`` as the value of a label."""
    return name if len(name) <= 63 else f"{name[:54].rstrip('-.')}-{digest(name)}"


def selector(queue: str, part: str | None = None) -> dict[str, str]:
    """Labels that select the children of a queue, or the pods of one part. They never change."""
    found = {MANAGED_BY: MANAGER, QUEUE_LABEL: label_value(queue)}
    return found if part is None else {**found, "app.kubernetes.io/component": part}


def labels(queue: str, part: str) -> dict[str, str]:
    """All labels of a child."""
    return {"app.kubernetes.io/name": "transferqueue", **selector(queue, part)}
