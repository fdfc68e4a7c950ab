"""Kubernetes events about queues: one when something changes, none when it flaps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from tq_operator.plan.names import MANAGER, digest
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import API_VERSION, KIND

__all__ = ["EventGate", "event", "worth_an_event"]

_AGAIN_S = 600.0
_REMEMBERED = 10_000
_LONGEST_NOTE = 1024  # bytes, of which the apiserver takes no more


class EventGate:
    """Lets the same news about the same queue through once in ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: OrderedDict[tuple[str, ...], float] = OrderedDict()

    def admits(self, *news: str) -> bool:
        now = self._clock()
        if now - self._sent.get(news, -_AGAIN_S) < _AGAIN_S:
            return False
        self._sent[news] = now
        self._sent.move_to_end(news)
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
        return True

    def forget(self, *news: str) -> None:
        """They could not be sent: let them through the next time."""
        self._sent.pop(news, None)


def worth_an_event(condition: dict[str, Any], previous: dict[str, Any]) -> bool:
    """Whether a condition says something that the previous status did not."""
    if condition["type"] == "Progressing" and condition["reason"] != "Held":
        return False
    old = next((other for other in previous.get("conditions", []) if other["type"] == condition["type"]), None)
    if old is None:  # a new queue is not yet ready and not degraded: no news
        return bool(condition["status"] == "True" or condition["type"] == "RdmaAvailable")
    return (old["status"], old["reason"]) != (condition["status"], condition["reason"])


def event(document: Manifest, condition: dict[str, Any], identity: str) -> Manifest:
    """The events.k8s.io event that tells of ``condition``."""
    metadata = document["metadata"]
    bad = condition["type"] == "Degraded"
    good = condition["reason"] != "Held" and bad != (condition["status"] == "True")
    mark = digest(f"{metadata['uid']} {condition['type']} {condition['reason']} {condition['lastTransitionTime']}")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200].rstrip('-.')}.{mark}", "namespace": metadata["namespace"]},
        "regarding": {
            "apiVersion": document.get("apiVersion", API_VERSION),
            "kind": document.get("kind", KIND),
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Normal" if good else "Warning",
        "reason": condition["reason"],
        "action": "Reconcile",
        "note": (condition["message"] or condition["reason"]).encode()[:_LONGEST_NOTE].decode(errors="ignore"),
        "reportingController": MANAGER,
        "reportingInstance": identity,
        "eventTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
