"""Keys that wait for work, and when each gets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tq_operator.runtime.watched import Key
from transfer_queue.backoff import Backoff

__all__ = ["WorkQueue"]

logger = logging.getLogger("tq_operator.work_queue")

_WORKERS = 4
_GATHER_S = 0.1
"""Events of one change arrive together; one turn answers them all."""
_SPACING_S = 0.5
"""Between two turns of one key: a child that flaps does not keep the operator busy."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_ASK_AGAIN_S = 0.2
"""Between two questions whether this replica leads by now."""


class WorkQueue:
    """Gives each added key a turn on a thread. A key has one turn at a time, however often it is added.

    Args:
        work: Blocking. Returns whether the key is settled; if not, or if it raises, the key gets another turn after a
            delay that doubles up to a minute, with jitter.
        leading: Whether this replica may work. Keys wait while it may not.
    """

    def __init__(self, work: Callable[[Key], bool], leading: Callable[[], bool]) -> None:
        self._work = work
        self._leading = leading
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        """Keys at work, or whose last turn ended less than ``_SPACING_S`` ago."""
        self._backoffs: dict[Key, Backoff] = {}
        """Of keys that are not settled."""
        self._retries: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Give a key a turn soon."""
        self._waiting.add(key)
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        workers = asyncio.Semaphore(_WORKERS)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(_GATHER_S)
                self._wake.clear()
                if not self._leading():
                    # No election may follow: a lease that ran out can be renewed within one round of it.
                    await asyncio.sleep(_ASK_AGAIN_S)
                    self._wake.set()
                    continue
                for key in self._waiting - self._busy:
                    self._waiting.discard(key)
                    self._busy.add(key)
                    task = asyncio.create_task(self._turn(key, workers))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()

    async def _turn(self, key: Key, workers: asyncio.Semaphore) -> None:
        loop = asyncio.get_running_loop()
        settled = False
        try:
            async with workers:
                settled = await asyncio.to_thread(self._work, key)
        except Exception:  # the boundary of one queue: the others go on, this one is tried again
            logger.exception("queue %s/%s", *key)
        finally:
            loop.call_later(_SPACING_S, self._rested, key)
        if (waiting := self._retries.pop(key, None)) is not None:
            waiting.cancel()
        if settled:
            self._backoffs.pop(key, None)
        else:
            backoff = self._backoffs.setdefault(key, Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S, spread=0.5))
            self._retries[key] = loop.call_later(backoff.next_s(), self.add, key)

    def _rested(self, key: Key) -> None:
        self._busy.discard(key)
        if key in self._waiting:
            self._wake.set()
