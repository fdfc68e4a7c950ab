"""The operator process: settings, servers, watches, and their common end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import kopf
from aiohttp import web
from kubernetes import client, config

from tq_operator.plan.queue import Manifest
from tq_operator.runtime.bindings import Attachments
from tq_operator.runtime.cluster import Cluster
from tq_operator.runtime.handlers import kopf_settings, watch
from tq_operator.runtime.lease import Elector
from tq_operator.runtime.probes import Readiness, leave, probe_application
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.settings import OperatorSettings
from tq_operator.runtime.trust import Trust
from tq_operator.runtime.webhook import Certificate, webhook_application
from transfer_queue.errors import StartError, TransferQueueError

__all__ = ["api_client", "main", "run"]

logger = logging.getLogger("tq_operator")

_SWITCH_S = 0.0005
_THREADS = 32


def main() -> int:
    """Run until SIGTERM. An expected fault is one line on stderr and exit code 1."""
    try:
        settings = OperatorSettings.from_environment(os.environ)
        kopf.configure(log_format=kopf.LogFormat.JSON)
        logging.getLogger().setLevel(settings.log_level)
        # It logs what it is answered, Secrets among it.
        logging.getLogger("kubernetes.client.rest").setLevel(logging.INFO)
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for each event that is looked at
        asyncio.run(run(settings))
    except TransferQueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def run(settings: OperatorSettings) -> None:
    """Serve until the process is asked to end. Raises StartError, and what ended a part of it."""
    # Admission, which pods wait for, gets the interpreter between the steps of reconciliation, and never waits for one
    # of its threads.
    sys.setswitchinterval(_SWITCH_S)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "operator"))
    cluster = Cluster(api_client())
    elector = (
        Elector(cluster, settings.lease_namespace, settings.lease_name, settings.identity)
        if settings.lease_namespace
        else None
    )
    leading = (lambda: elector.leading) if elector else (lambda: True)
    reconciler = Reconciler(
        cluster,
        settings.images,
        settings.namespaces,
        settings.identity,
        leading,
        settings.default_tls,
        settings.release,
    )
    reconciler.metrics.show_leader(leading)
    trust = Trust(cluster, settings.webhook_secret, settings.certificates, leading) if settings.webhook_secret else None
    if trust:
        await trust.start()
    certificate = Certificate(settings.certificates)
    readiness = Readiness(reconciler, settings.resync, certificate, elector)
    leaving = asyncio.Event()

    attachments = Attachments(cluster, settings.namespaces, settings.identity, leading, reconciler.metrics)

    def find_bindings(namespace: str) -> list[Manifest]:
        return cluster.bindings([namespace])

    # kopf names itself by the user otherwise, whom an image does not know where the platform chooses one.
    os.environ.setdefault("POD_ID", settings.identity)
    registry = kopf.get_default_registry()
    watch(registry, reconciler)
    started, tasks = asyncio.Event(), list[asyncio.Future[None]]()
    async with (
        _cancelled_at_the_end(tasks),  # after the servers, which answer open requests first
        _serving(
            webhook_application(
                reconciler.documents,
                cluster.queue,
                find_bindings,
                reconciler.metrics,
                settings.default_tls,
                leaving.is_set,
            ),
            settings.webhook_port,
            certificate,
        ),
        _serving(probe_application(reconciler, readiness, leaving), settings.health_port),
    ):
        operator = kopf.operator(
            registry=registry,
            settings=kopf_settings(namespaced=bool(settings.namespaces)),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            ready_flag=started,
        )
        # All end with the first that ends.
        parts = [
            operator,
            _signal(started),
            reconciler.work.run(),
            reconciler.resync(settings.resync),
            reconciler.follow_saves(),
            certificate.watch(reconciler.metrics.certificate_ends.set),
            attachments.run(settings.resync),
            readiness.check_rights(cluster, settings.namespaces, settings.lease_namespace),
        ]
        if elector:
            parts.append(elector.run(reconciler.request_all))
        if trust:
            parts.append(trust.run())
        tasks += map(asyncio.ensure_future, parts)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not leaving.is_set():  # the kubelet did not call its hook
            await leave(leaving)
        for task in done:
            task.result()


def api_client() -> client.ApiClient:
    """With the credentials of the pod, or of the kubeconfig of the environment. Raises StartError."""
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            config.load_kube_config()  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise StartError(f"neither in a pod nor a usable kubeconfig: {error}") from None
    return client.ApiClient()


@asynccontextmanager
async def _serving(
    application: web.Application, port: int, certificate: Certificate | None = None
) -> AsyncIterator[None]:
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, None, port, ssl_context=certificate.context if certificate else None).start()
        except OSError as error:
            raise StartError(f"cannot listen on port {port}: {error.strerror}") from None
        yield
    finally:
        await runner.cleanup()


async def _signal(started: asyncio.Event) -> None:
    """Until the process is asked to end. kopf, once ``started``, would cancel all tasks of the loop on a signal, among
    them those that answer admission reviews."""
    await started.wait()
    ended = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    await ended.wait()


@asynccontextmanager
async def _cancelled_at_the_end(tasks: list[asyncio.Future[None]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
