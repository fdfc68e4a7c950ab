"""Being part of a Ray cluster, and waiting for its answers on an event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from transfer_queue.config.document import Document
from transfer_queue.errors import ConfigError, WaitTimeoutError
from transfer_queue.storage.ray.transports import Transport, ready

__all__ = ["RayStoreSettings", "answer", "connect", "first_line"]


class RayStoreSettings(Document):
    """Settings of the backend ``ray``."""

    address: str | None = None
    """host:port of the cluster's GCS, for processes that are not part of it yet; the Ray launcher fills it in."""
    namespace: str = "transfer_queue"
    """Ray namespace of the owners' names."""
    transport: Transport = "object_store"
    """How blocks come to readers: through Ray's object store, or by a tensor transport of Ray Direct Transport."""
    prefault: bool = True
    """Of the arena of other backends; without effect here."""


def connect(settings: RayStoreSettings) -> bool:
    """Join the cluster unless this process is part of one; True if it joined. Blocks.

    Raises ConfigError, also if the transport does not work here.
    """
    ready(settings.transport)
    if ray.is_initialized():
        return False
    if settings.address is None:
        raise ConfigError(
            "backend ray: this process is not part of a Ray cluster and no address is set; call ray.init() before "
            "transfer_queue.init()"
        )
    try:
        ray.init(settings.address, namespace=settings.namespace, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(f"backend ray: no Ray cluster answers at {settings.address}: {error}") from None
    return True


async def answer(reference: Any, timeout_s: float) -> Any:
    """The value of a reference. Raises WaitTimeoutError, and RayError as Ray does."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise WaitTimeoutError(f"Ray did not answer within {timeout_s:g} s") from None


def first_line(error: Exception) -> str:
    """Ray's errors are pages long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
