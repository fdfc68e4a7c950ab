"""Admission over HTTPS. Every replica serves it, from the certificate in one shared Secret."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography import x509

from tq_operator.admission.conversion import convert_review
from tq_operator.admission.review import (
    MalformedReviewError,
    Review,
    allow,
    bound_queue,
    deny,
    mutate_pod,
    queue_of,
    read_review,
    validate_queue,
)
from tq_operator.api.binding import binding_from
from tq_operator.plan.queue import Manifest, queue_from
from tq_operator.runtime.cluster import ClusterError
from tq_operator.runtime.metrics import OperatorMetrics
from transfer_queue.config.resource import TlsMode
from transfer_queue.errors import ConfigError, StartError

__all__ = ["BIND_PATH", "CONVERT_PATH", "INJECT_PATH", "VALIDATE_PATH", "Certificate", "webhook_application"]

logger = logging.getLogger("tq_operator.webhook")

INJECT_PATH = "/inject"
BIND_PATH = "/bind"
VALIDATE_PATH = "/validate"
CONVERT_PATH = "/convert"
# etcd holds objects up to 1.5 MiB; the review carries the object, and for updates the old one. Conversions come for all
# objects of a list at once.
_LARGEST_REVIEW = 64 << 20
_LOOK_S = 2.0

FindBindings = Callable[[str], list[Manifest]]
"""Namespace -> its bindings. Blocking; raises ClusterError."""
FindQueue = Callable[[str, str], Manifest | None]
"""(namespace, name) -> the queue as the apiserver has it. Blocking; raises ClusterError."""


class Certificate:
    """tls.crt and tls.key of a folder, as the kubelet mounts a Secret; a change is taken up while serving."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / "tls.crt", folder / "tls.key")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ends = 0.0
        """Unix time."""
        self._loaded = self._state()
        self._load()

    def _state(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (file.stat() for file in self._files))
        except OSError as error:
            raise StartError(f"no certificate for the webhook: {error.filename}: {error.strerror}") from None

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(*self._files)
            self.ends = x509.load_pem_x509_certificate(self._files[0].read_bytes()).not_valid_after_utc.timestamp()
        except (OSError, ValueError, ssl.SSLError) as error:
            raise StartError(f"the certificate of the webhook cannot be used: {error}") from None

    async def watch(self, report_end: Callable[[float], None]) -> None:
        """Take up changed files until cancelled. New connections get the new certificate, open ones go on."""
        while True:
            report_end(self.ends)
            await asyncio.sleep(_LOOK_S)
            try:
                state = self._state()
                if state != self._loaded:
                    self._load()
                    self._loaded = state
                    logger.info("took up a new certificate")
            except StartError as error:  # half-written: the old one stays in use, look again
                logger.warning("%s", error)


def webhook_application(
    known: Mapping[tuple[str, str], Manifest],
    find_queue: FindQueue,
    find_bindings: FindBindings,
    metrics: OperatorMetrics,
    default_tls: TlsMode = "off",
    leaving: Callable[[], bool] = lambda: False,
) -> web.Application:
    """The webhooks: INJECT_PATH for labelled pods, BIND_PATH for pods of namespaces with bindings, VALIDATE_PATH for
    queues, CONVERT_PATH between versions of the API.

    ``known``: queues by namespace and name; others are looked up. ``leaving``: whether this replica ends soon. Then
    each connection is closed by its next answer, as the apiserver does not ask again where a connection ends under a
    request.
    """

    @web.middleware
    async def let_go(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if leaving():
            response.force_close()
        return response

    async def inject(review: Review) -> dict[str, Any]:
        try:
            wanted = queue_of(review)
        except ValueError as error:
            return deny(review, str(error))
        if wanted is None:
            return allow(review)
        return await attach(review, *wanted)

    async def bind(review: Review) -> dict[str, Any]:
        try:
            bindings = await asyncio.to_thread(find_bindings, review.namespace)
            wanted = bound_queue(review, [binding_from(document) for document in bindings])
        except ClusterError as error:
            return deny(review, f"cannot look up TransferQueueBindings: {error}", 503)
        except ValueError as error:
            return deny(review, str(error))
        return await attach(review, *wanted) if wanted else allow(review)

    async def attach(review: Review, namespace: str, name: str) -> dict[str, Any]:
        try:
            # One that was just created may not have been seen yet.
            document = known.get((namespace, name)) or await asyncio.to_thread(find_queue, namespace, name)
        except ClusterError as error:
            return deny(review, f"cannot look up TransferQueue {namespace}/{name}: {error}", 503)
        if document is None:
            return deny(
                review, f"TransferQueue {namespace}/{name} does not exist; create it before pods that use it", 404
            )
        if "deletionTimestamp" in document["metadata"]:
            return deny(
                review, f"TransferQueue {namespace}/{name} is being deleted; create it again before its pods", 409
            )
        try:
            return mutate_pod(review, queue_from(document, default_tls))
        except ConfigError as error:
            return deny(review, f"TransferQueue {namespace}/{name} is not valid: {error}")

    async def validate(review: Review) -> dict[str, Any]:
        return validate_queue(review, default_tls)

    application = web.Application(client_max_size=_LARGEST_REVIEW, middlewares=[let_go])
    for path, answer in ((INJECT_PATH, inject), (BIND_PATH, bind), (VALIDATE_PATH, validate)):
        application.router.add_post(path, _handler(answer, metrics))
    application.router.add_post(CONVERT_PATH, _conversion_handler(metrics))
    return application


def _conversion_handler(metrics: OperatorMetrics) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        began = time.monotonic()
        try:
            answer = convert_review(json.loads(await request.read()))
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)
        result = answer["response"]["result"]
        done = "yes" if result["status"] == "Success" else "no"
        metrics.admission.labels("convert", done).observe(time.monotonic() - began)
        if done == "no":
            logger.info("not converted: %s", result["message"])
        return web.json_response(answer)

    return handle


def _handler(answer: Callable[[Review], Any], metrics: OperatorMetrics) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        began = time.monotonic()
        try:
            review = read_review(json.loads(await request.read()))
        except (MalformedReviewError, ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)
        response = await answer(review)
        allowed = "yes" if response["response"]["allowed"] else "no"
        metrics.admission.labels(request.path.strip("/"), allowed).observe(time.monotonic() - began)
        if not response["response"]["allowed"]:
            logger.info("refused in %s: %s", review.namespace, response["response"]["status"]["message"])
        return web.json_response(response)

    return handle
