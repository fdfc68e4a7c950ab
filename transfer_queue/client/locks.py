"""Locks of the queue: names within a partition that one client at a time holds, wherever it runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import QueueEngine
from transfer_queue.control.commands import Lock, RenewLock, Value
from transfer_queue.control.puts import name_some
from transfer_queue.errors import (
    ConnectionLostError,
    InvalidInputError,
    LockLostError,
    TransferQueueError,
    WaitTimeoutError,
)

__all__ = ["GlobalLock", "giving_back", "taking"]

_REQUEST_S = 10.0
_YEAR_S = 365 * 86400.0
_giving_back: set[asyncio.Task[None]] = set()


class GlobalLock:
    """A lock that this client holds: what ``kv_global_lock`` gives.

    Attributes:
        keys: The locked names.
        partition_id: Their partition.
        lease_s: Seconds for which the lock outlives its last renewal.
        number: Grows with each lock that the partition's controller grants. A put with ``lock=`` carries it.
        fence: The number, for each key.
        lost: Whether the lock is known to have ended. ``check`` raises then.
    """

    def __init__(self, engine: QueueEngine, keys: list[str], partition_id: str, lease_s: float) -> None:
        self.keys = keys
        self.partition_id = partition_id
        self.lease_s = lease_s
        self.number = 0
        self.fence: dict[str, int] = {}
        self._engine = engine
        self._deadline = math.inf
        self._renewing: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def lost(self) -> bool:
        return self._ended or time.monotonic() >= self._deadline

    def check(self) -> None:
        """Raise LockLostError if the lock has ended. Call it before writes that do not carry the lock."""
        if self.lost:
            raise LockLostError(
                f"the lock of {self.keys} in partition {self.partition_id!r} has ended, as it was not renewed within "
                f"{self.lease_s:g} s or the connection to the controller was lost; another may hold it. Lock again"
            )

    def number_for(self, partition_id: str, keys: list[str]) -> int:
        """What a put of ``keys`` carries. Raises LockLostError; InvalidInputError for keys or a partition that the lock
        does not hold."""
        self.check()
        if partition_id != self.partition_id:
            raise InvalidInputError(f"a lock of partition {self.partition_id!r} cannot guard a put to {partition_id!r}")
        if others := [key for key in keys if key not in self.keys]:
            raise InvalidInputError(
                f"the lock is of {name_some(self.keys)} and does not guard a put of {name_some(others)}; lock all keys "
                "that the put writes"
            )
        return self.number

    async def take(self, wait_s: float) -> GlobalLock:
        """On the I/O loop."""
        sent = time.monotonic()
        command = Lock(self.partition_id, self.keys, wait_s, self.lease_s)
        reply = await self._engine.request(command, wait_s + _REQUEST_S, wait_s or None)
        assert isinstance(reply, Value)
        self.number = int(reply.value["lock"])
        self.fence = dict.fromkeys(self.keys, self.number)
        self._deadline = sent + float(reply.value["waited"]) + self.lease_s
        self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return self

    async def give_back(self) -> None:
        """On the I/O loop. What cannot be told to the controller ends with its lease."""
        if self._renewing is not None:
            self._renewing.cancel()
        if not self._ended:
            with contextlib.suppress(TransferQueueError):
                await self._engine.request(RenewLock(self.partition_id, self.number), min(self.lease_s, _REQUEST_S))

    async def _renew(self) -> None:
        while not self.lost:
            await asyncio.sleep(self.lease_s / 3)
            sent = time.monotonic()
            try:
                reply = await self._engine.request(
                    RenewLock(self.partition_id, self.number, self.lease_s), max(0.001, self._deadline - sent)
                )
            except (ConnectionLostError, WaitTimeoutError):
                continue
            except TransferQueueError:
                self._ended = True
                raise
            assert isinstance(reply, Value)
            if not reply.value:
                self._ended = True
            self._deadline = sent + self.lease_s


def taking(
    engine: QueueEngine, keys: list[str], partition_id: str, timeout: float | None, lease_s: float
) -> Operation[GlobalLock, GlobalLock]:
    """Wait for a lock. ``timeout`` None: for ever."""
    if type(lease_s) not in (int, float) or not 0 < lease_s < math.inf:
        raise InvalidInputError(f"lease_s must be a positive number of seconds, not {lease_s!r}")
    lock = GlobalLock(engine, keys, partition_id, float(lease_s))
    work = lock.take(_YEAR_S if timeout is None else min(float(timeout), _YEAR_S))
    return Operation(work, lambda taken: taken, drop=_drop)


def _drop(lock: GlobalLock) -> None:
    """The caller gave up just as the lock was granted."""
    _giving_back.add(task := asyncio.get_running_loop().create_task(lock.give_back()))
    task.add_done_callback(_giving_back.discard)


def giving_back(lock: GlobalLock) -> Operation[None, None]:
    """End a lock."""
    return Operation(lock.give_back(), lambda done: done)
