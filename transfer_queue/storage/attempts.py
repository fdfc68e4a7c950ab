"""Connecting to a server once for all the calls that need it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from transfer_queue.errors import ConnectionLostError

__all__ = ["Attempts"]

T = TypeVar("T")


class Attempts(Generic[T]):
    """Attempts under way, by number of the storage unit. Calls that join one share its outcome, also if it fails: one
    after the other would each wait for a server that does not answer. Runs on the I/O loop."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[T]] = {}

    async def join(self, unit: int, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of the attempt under way, or of a new one by ``make``.

        Raises what ``make`` raises, and ConnectionLostError if the attempt was given up by ``cancel``.
        """
        task = self._tasks.get(unit)
        if task is None:
            task = self._tasks[unit] = asyncio.get_running_loop().create_task(make())
            task.add_done_callback(lambda done: self._end(unit, done))
        try:
            return await asyncio.shield(task)  # a call that gives up ends no attempt of others
        except asyncio.CancelledError:
            if task.cancelled():
                raise ConnectionLostError("the connection to the storage unit is closed") from None
            raise

    def cancel(self) -> None:
        """Give all attempts up."""
        for task in self._tasks.values():
            task.cancel()

    def _end(self, unit: int, task: asyncio.Task[T]) -> None:
        del self._tasks[unit]
        if not task.cancelled():
            task.exception()  # seen, also if every call has given up
