"""An operation of a client in three steps, so that blocking and awaited calls share all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transfer_queue.client.io import IoThread
from transfer_queue.client.reading import LoadedBatch, LoadedBatches
from transfer_queue.client.twins import is_blocking

__all__ = ["Operation", "carry_out", "spanned"]

R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_THREAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Operation(Generic[R, T]):
    """A call whose arguments are checked and encoded. ``work`` runs on the I/O loop, then ``finish`` on its result.

    ``finish`` (decoding) runs in the calling thread, or in the worker thread if it is long and the caller is a loop.
    """

    work: Coroutine[Any, Any, R]
    finish: Callable[[R], T]
    nbytes: int = 0
    """Bytes that a put stores."""
    drop: Callable[[R], None] | None = None
    """Gets the result of ``work`` in place of ``finish`` if the caller gave up."""
    direct: bool = False
    """``work`` may begin in the thread of a blocking call, and goes on on the loop when it awaits ``twins.on_loop``."""
    span: Callable[[], dict[str, str]] | None = None
    """Attributes of the operation's span; None: it has no span."""

    def unwanted(self, work: asyncio.Task[R]) -> None:
        """``work`` ended after the caller had given up."""
        if self.drop is not None and not work.cancelled() and work.exception() is None:
            self.drop(work.result())


def spanned(name: str) -> Callable[[F], F]:
    """Decorator: the operations that a function builds are OpenTelemetry spans of this name."""

    def mark(build: F) -> F:
        build.span_name = name  # type: ignore[attr-defined]
        return build

    return mark


async def carry_out(io: IoThread, operation: Operation[R, T]) -> T:
    """Run the work of an operation on the I/O loop, and decode its result."""
    if is_blocking():
        if operation.direct:
            try:
                operation.work.send(None)
            except StopIteration as done:
                return operation.finish(done.value)
        return operation.finish(io.wait(operation.work, unwanted=operation.unwanted))
    result = await io.run(operation.work, operation.unwanted)
    if isinstance(result, LoadedBatch | LoadedBatches) and result.nbytes > _THREAD_BYTES:
        # Given up before the thread came to it, it has not been released.
        return await io.run(io.run_copy(lambda: operation.finish(result)), lambda work: result.release())
    return operation.finish(result)
