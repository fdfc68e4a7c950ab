"""An operation of a client in three steps, so that sync and async callers share all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transfer_queue.client.io import IoThread
from transfer_queue.client.reading import LoadedBatch, LoadedBatches

__all__ = ["Operation", "run_async", "run_sync"]

R = TypeVar("R")
T = TypeVar("T")
_THREAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Operation(Generic[R, T]):
    """The caller has checked and encoded its arguments; ``work`` runs on the I/O loop, then ``finish`` on its result.

    ``finish`` (decoding) runs in the calling thread, or in the worker thread if it is long and the caller is a loop.
    ``nbytes``: what a put stores. ``drop`` gets the result of ``work`` in place of ``finish`` if the caller gave up.
    """

    work: Coroutine[Any, Any, R]
    finish: Callable[[R], T]
    nbytes: int = 0
    drop: Callable[[R], None] | None = None

    def unwanted(self, work: asyncio.Task[R]) -> None:
        """``work`` ended after the caller had given up."""
        if self.drop is not None and not work.cancelled() and work.exception() is None:
            self.drop(work.result())


def run_sync(io: IoThread, operation: Operation[R, T]) -> T:
    return operation.finish(io.wait(operation.work, unwanted=operation.unwanted))


async def run_async(io: IoThread, operation: Operation[R, T]) -> T:
    result = await io.run(operation.work, operation.unwanted)
    if isinstance(result, LoadedBatch | LoadedBatches) and result.nbytes > _THREAD_BYTES:
        # Given up before the thread came to it, it has not been released.
        return await io.run(io.run_copy(lambda: operation.finish(result)), lambda work: result.release())
    return operation.finish(result)
