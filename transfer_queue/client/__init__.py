"""Clients: one I/O thread a process, an async client, and the sync facade derived from it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.client.client import AsyncTransferQueueClient, TransferQueueClient

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]


def __getattr__(name: str) -> Any:  # lazily, so that parts of this package can be imported without the whole
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("transfer_queue.client.client"), name)
