"""/healthz: the process lives. /readyz: it has seen the queues lately, so its watches and its rights work."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tq_operator.runtime.reconciler import Reconciler

__all__ = ["probe_application"]

_SLACK_S = 30.0


def probe_application(reconciler: Reconciler, resync: float) -> web.Application:
    """Served over plain HTTP to the kubelet. The webhook listens before this answers at all."""

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        if reconciler.last_sync is None:
            return web.Response(status=503, text="the queues were not listed yet\n")
        age = asyncio.get_running_loop().time() - reconciler.last_sync
        if age > 3 * resync + _SLACK_S:
            return web.Response(status=503, text=f"the queues were last listed {age:.0f} s ago\n")
        return web.Response(text="ready\n")

    application = web.Application()
    application.router.add_get("/healthz", healthy)
    application.router.add_get("/readyz", ready)
    return application
