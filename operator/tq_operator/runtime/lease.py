"""Which replica writes: one that holds a Lease. All of them watch, so the next one can go on at once."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import Cluster, ClusterError

__all__ = ["Elector", "LeaseTimes", "is_held"]

logger = logging.getLogger("tq_operator.lease")

_HELD_S = 60.0
"""For so long after its last renewal a Lease of another operator counts as held. Clocks of machines differ by less."""


@dataclass(frozen=True)
class LeaseTimes:
    """In seconds. A leader that cannot renew stops ``margin`` before the others may take over."""

    duration: float = 10.0
    renew: float = 2.0
    margin: float = 3.0

    @property
    def takeover(self) -> float:
        """The longest time without a leader after one died."""
        return self.duration + 1.5 * self.renew


def is_held(lease: Mapping[str, Any] | None, now: datetime) -> bool:
    """Whether an operator holds a Lease, by the clock of this machine."""
    spec = (lease or {}).get("spec") or {}
    if not spec.get("holderIdentity") or not spec.get("renewTime"):
        return False
    renewed = datetime.fromisoformat(spec["renewTime"].replace("Z", "+00:00"))
    return (now - renewed).total_seconds() < _HELD_S


class Elector:
    """Holds or waits for the Lease ``namespace/name``. Clocks of other machines do not matter: a lease is over when
    it was not renewed for its duration as seen from here.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, name: str, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self._cluster = cluster
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        # A pool of its own: a renewal never waits behind reconciliations.
        self._thread = ThreadPoolExecutor(1, "lease")
        self._valid_until = 0.0
        self._seen: tuple[str, float] = ("", 0.0)
        self.contact: float | None = None
        """time.monotonic() of the last answer about the lease."""
        self.holder = ""

    @property
    def leading(self) -> bool:
        """May this replica write now? Safe to ask from any thread."""
        return time.monotonic() < self._valid_until

    async def run(self, elected: Callable[[], None]) -> None:
        """Stay in the election until cancelled, then hand over at once. ``elected`` is called on each election."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                before = self.leading
                try:
                    await loop.run_in_executor(self._thread, self._round)
                except (ClusterError, NotFoundError, ConflictError) as error:
                    logger.warning("no answer about the lease: %s", error)
                if self.leading and not before:
                    logger.info("leading as %s", self._identity)
                    elected()
                elif before and not self.leading:
                    logger.warning("no longer leading")
                await asyncio.sleep(self._times.renew * random.uniform(0.75, 1.25))
        finally:
            await asyncio.shield(loop.run_in_executor(self._thread, self._release))
            self._thread.shutdown()

    def _round(self) -> None:
        asked = time.monotonic()
        try:
            lease = self._cluster.call("GET", f"{self._path}/{self._name}")
        except NotFoundError:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            self._cluster.call("POST", self._path, {**body, "spec": self._spec({})})
            self._won(asked)
            return
        self.contact = asked
        spec = lease.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        mark = f"{self.holder} {spec.get('renewTime')}"
        if mark != self._seen[0]:
            self._seen = (mark, asked)
        over = asked - self._seen[1] > spec.get("leaseDurationSeconds", 0)
        if self.holder not in ("", self._identity) and not over:
            self._valid_until = 0.0
            return
        # The resourceVersion in the lease makes this fail if another replica was faster.
        self._cluster.call("PUT", f"{self._path}/{self._name}", {**lease, "spec": self._spec(spec)})
        self._won(asked)

    def _won(self, asked: float) -> None:
        self._valid_until = asked + self._times.duration - self._times.margin
        self.contact, self.holder = asked, self._identity

    def _spec(self, old: dict[str, Any]) -> Manifest:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = old.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._times.duration),
            "acquireTime": old.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": old.get("leaseTransitions", 0) + (0 if same else 1),
        }

    def _release(self) -> None:
        if not self.leading:
            return
        self._valid_until = 0.0
        try:
            lease = self._cluster.call("GET", f"{self._path}/{self._name}")
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._cluster.call("PUT", f"{self._path}/{self._name}", lease)
        except (ClusterError, NotFoundError, ConflictError) as error:
            logger.warning("the lease runs out by itself: %s", error)
