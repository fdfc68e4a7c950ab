"""Read the report of the process that restores and saves a queue from its HTTP port."""

from __future__ import annotations

import http.client

import msgspec

from tq_operator.plan.names import selector
from tq_operator.plan.queue import Queue
from tq_operator.plan.settings import checkpoint_settings
from tq_operator.plan.status import Observation
from tq_operator.runtime.fetch import fetch
from tq_operator.runtime.masters import runs
from transfer_queue.config.attach import join_address
from transfer_queue.config.running import CheckpointReport

__all__ = ["checkpoint_report"]

_LONGEST = 64 << 10
"""Bytes of an answer."""


def checkpoint_report(queue: Queue, seen: Observation) -> CheckpointReport | None:
    """Blocking. None if the queue has no such process, or if the process does not answer."""
    settings = checkpoint_settings(queue)
    if settings is None:
        return None
    chosen = selector(queue.name, "checkpoint").items()
    for pod in seen.pods:
        if chosen <= pod["metadata"].get("labels", {}).items() and runs(pod):
            try:
                _, body = fetch(f"http://{join_address(pod['status']['podIP'], settings['metricsPort'])}/status")
                return msgspec.json.decode(body[:_LONGEST], type=CheckpointReport)
            except (OSError, http.client.HTTPException, ValueError):
                continue
    return None
