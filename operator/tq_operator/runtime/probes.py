"""/healthz: the process lives. /readyz: it can do its work, or says what is missing. /metrics: for Prometheus.
/leave: the kubelet's word that this pod ends, answered when the apiserver had the time to call another replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from aiohttp import web
from prometheus_client import generate_latest

from tq_operator.runtime.cluster import Cluster, ClusterError
from tq_operator.runtime.lease import Elector
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.rights import missing_rights
from tq_operator.runtime.webhook import Certificate

__all__ = ["Readiness", "leave", "probe_application"]

logger = logging.getLogger("tq_operator.probes")

_SLACK_S = 30.0
_RIGHTS_S = 60.0
_LEAVE_S = 3.0  # until everybody knows that this pod is no endpoint of the webhook any more


class Readiness:
    """What this replica still needs for admission and, should it be elected, for its work."""

    def __init__(
        self, reconciler: Reconciler, resync: float, certificate: Certificate, elector: Elector | None
    ) -> None:
        self._reconciler = reconciler
        self._resync = resync
        self._certificate = certificate
        self._elector = elector
        self._rights: list[str] | None = None

    def missing(self) -> str:
        """Empty when ready."""
        last = self._reconciler.last_sync
        if last is None:
            return "the queues were not listed yet"
        age = asyncio.get_running_loop().time() - last
        if age > 3 * self._resync + _SLACK_S:
            return f"the queues were last listed {age:.0f} s ago"
        if self._certificate.ends <= time.time():
            return "the certificate of the webhook has ended"
        if self._rights is None:
            return "the rights of the operator were not checked yet"
        if self._rights:
            return f"missing rights: {'; '.join(self._rights)}"
        if self._elector and (self._elector.contact is None or time.monotonic() - self._elector.contact > _SLACK_S):
            return "the lease cannot be read or written"
        return ""

    async def check_rights(self, cluster: Cluster, namespaces: Sequence[str], lease_namespace: str) -> None:
        """Ask until nothing is missing, then wait to be cancelled."""
        while self._rights != []:
            try:
                found = await asyncio.to_thread(missing_rights, cluster, namespaces, lease_namespace)
                if found and found != self._rights:
                    logger.error("the service account may not: %s", "; ".join(found))
                self._rights = found
            except ClusterError as error:
                logger.warning("cannot check the rights: %s", error)
            await asyncio.sleep(_RIGHTS_S if self._rights else 1.0)
        await asyncio.Event().wait()


async def leave(leaving: asyncio.Event) -> None:
    """Set ``leaving``, and return when the apiserver had the time to let go of this replica: it is not ready any more,
    and its webhook closes each connection with its next answer."""
    leaving.set()
    await asyncio.sleep(_LEAVE_S)


def probe_application(reconciler: Reconciler, readiness: Readiness, leaving: asyncio.Event) -> web.Application:
    """Served over plain HTTP to the kubelet. The webhook listens before this answers at all."""

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        missing = "this replica ends" if leaving.is_set() else readiness.missing()
        return web.Response(status=503 if missing else 200, text=f"{missing or 'ready'}\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(reconciler.metrics.registry), content_type="text/plain")

    async def told_to_leave(_: web.Request) -> web.Response:
        await leave(leaving)
        return web.Response(text="ok\n")

    application = web.Application()
    application.router.add_get("/leave", told_to_leave)
    application.router.add_get("/healthz", healthy)
    application.router.add_get("/readyz", ready)
    application.router.add_get("/metrics", metrics)
    return application
