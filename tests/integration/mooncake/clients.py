"""Clients of Mooncake without a queue. Does without torch, which is slow to import."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from transfer_queue.storage.base import BackendContext
from transfer_queue.storage.mooncake.client import MooncakeBackend, open_backend


@asynccontextmanager
async def client(settings: dict[str, Any], run: str) -> AsyncIterator[MooncakeBackend]:
    worker = concurrent.futures.ThreadPoolExecutor(1)

    async def run_copy(function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(worker, function)

    async def connect(address: str) -> Any:
        raise AssertionError("Mooncake clients do not talk to units")

    backend = await open_backend(BackendContext("test", 1, run, settings, connect, run_copy))
    try:
        yield backend
    finally:
        await backend.close()
        worker.shutdown()
