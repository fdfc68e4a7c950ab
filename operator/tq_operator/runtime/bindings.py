"""Reports on bindings, and on pods that asked for a queue and did not get it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from tq_operator.api.binding import BINDING_KIND, BINDING_PLURAL, binding_from
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import Cluster, ClusterError
from tq_operator.runtime.events import EventGate, event
from tq_operator.runtime.metrics import OperatorMetrics
from transfer_queue.errors import ConfigError

__all__ = ["Attachments"]

logger = logging.getLogger("tq_operator.bindings")

_FINISHED = {"Succeeded", "Failed"}
_LONGEST_S = 15.0


class Attachments:
    """The leader looks at bindings and labelled pods every few seconds; nothing is written at rest."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        identity: str,
        leading: Callable[[], bool],
        metrics: OperatorMetrics,
    ) -> None:
        self._cluster = cluster
        self._namespaces = namespaces
        self._identity = identity
        self._leading = leading
        self._metrics = metrics
        self._gate = EventGate()

    async def run(self, interval: float) -> None:
        """Until cancelled."""
        while True:
            if self._leading():
                try:
                    await asyncio.to_thread(self.look)
                except (ClusterError, NotFoundError) as error:
                    logger.warning("cannot look at bindings and pods: %s", error)
            await asyncio.sleep(min(interval, _LONGEST_S))

    def look(self) -> None:
        """Blocking. Raises ClusterError, and NotFoundError while the definitions are not served."""
        for document in self._cluster.bindings(self._namespaces):
            self._one("binding", document, self._report)
        missed = [pod for pod in self._cluster.missed_pods(self._namespaces) if not _is_done(pod)]
        self._metrics.missed.set(len(missed))
        for pod in missed:
            self._one("pod", pod, self._tell)

    def _one(self, what: str, document: Manifest, write: Callable[[Manifest], None]) -> None:
        """What is refused for one, say since it is being deleted, does not keep the others waiting."""
        if not self._leading():
            return
        try:
            write(document)
        except (ClusterError, NotFoundError) as error:
            metadata = document["metadata"]
            logger.warning("%s %s/%s: %s", what, metadata["namespace"], metadata["name"], error)

    def _tell(self, pod: Manifest) -> None:
        uid = pod["metadata"]["uid"]
        if not self._gate.admits(uid):
            return
        news = {
            "type": "Injected",
            "status": "False",
            "reason": "NotInjected",
            "message": "The pod asks for a TransferQueue but was made while no operator answered admission "
            "(webhook.failurePolicy Ignore), so it runs without; delete it, and its owner creates it again.",
            "lastTransitionTime": pod["metadata"]["creationTimestamp"],
        }
        told = {**pod, "apiVersion": "v1", "kind": "Pod"}
        try:
            self._cluster.create_event({**event(told, news, self._identity), "type": "Warning"})
        except (ClusterError, NotFoundError):
            self._gate.forget(uid)
            raise

    def _report(self, document: Manifest) -> None:
        previous = (document.get("status") or {}).get("conditions", [])
        status, reason, message = self._state(document)
        old = previous[0] if previous else {}
        if (old.get("status"), old.get("reason"), old.get("message")) == (status, reason, message):
            return
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": "Bound",
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
            "observedGeneration": document["metadata"].get("generation", 0),
        }
        metadata = document["metadata"]
        self._cluster.write_status(
            metadata["namespace"], metadata["name"], {"conditions": [condition]}, BINDING_KIND, BINDING_PLURAL
        )

    def _state(self, document: Manifest) -> tuple[str, str, str]:
        try:
            binding = binding_from(document)
        except ConfigError as error:
            return "False", "InvalidSpec", str(error)
        namespace, name = binding.queue
        own = document["metadata"]["namespace"]
        queue: dict[str, Any] | None = self._cluster.queue(namespace, name)
        if queue is None:
            return "False", "QueueNotFound", f"TransferQueue {namespace}/{name} does not exist."
        admitted = (queue["spec"].get("access") or {}).get("namespaces", [])
        if own != namespace and not {"*", own} & set(admitted):
            advice = f"add {own} to its spec.access.namespaces"
            return "False", "NotAdmitted", f"TransferQueue {namespace}/{name} does not admit this namespace; {advice}."
        return "True", "Bound", "New pods that the selector chooses get the queue."


def _is_done(pod: Manifest) -> bool:
    return pod.get("status", {}).get("phase") in _FINISHED or "deletionTimestamp" in pod["metadata"]
