"""Client side: one I/O thread per process, the clients, and the operations that they carry out.

``TransferQueueClient`` and ``AsyncTransferQueueClient`` are found through ``transfer_queue.compat.paths``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.compat.client import AsyncTransferQueueClient, TransferQueueClient

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]


def __getattr__(name: str) -> Any:
    return importlib.import_module("transfer_queue.compat.paths").legacy_attribute(__name__, name)
