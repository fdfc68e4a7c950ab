"""What servers count while they work: plain integers, read when somebody scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from transfer_queue.control.commands import Batch, Command, Committed, Fetch, Reply
from transfer_queue.wire.messages import Alloc, Extents, Put

__all__ = ["BOUNDS_S", "ControllerCounters", "Histogram", "RequestCounters", "UnitCounters"]

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
"""Upper bounds of the buckets of every histogram, in seconds."""


class Histogram:
    """A histogram of durations in seconds."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus wants them."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class RequestCounters:
    """Requests by the type of their message: how many took how long, how many were refused."""

    def __init__(self) -> None:
        self._times: dict[type, Histogram] = {}
        self._failed: dict[type, int] = {}

    def count(self, message: type, seconds: float, failed: bool) -> None:
        times = self._times.get(message)
        if times is None:
            times = self._times[message] = Histogram()
        times.observe(seconds)
        if failed:
            self._failed[message] = self._failed.get(message, 0) + 1

    def __iter__(self) -> Iterator[tuple[str, Histogram, int]]:
        """(name of the message, times, how many were refused)."""
        for message, times in self._times.items():
            yield message.__name__, times, self._failed.get(message, 0)


class ControllerCounters:
    """The counters of a controller, since its start. ``waits``: how long parked requests waited for their answer."""

    def __init__(self) -> None:
        self.requests = RequestCounters()
        self.waits = Histogram()
        self.rows_put = 0
        self.bytes_put = 0
        self.rows_fetched = 0

    def answered(self, command: Command, reply: Reply) -> None:
        """A command was answered at once."""
        if isinstance(reply, Committed):
            self.rows_put += len(reply.indexes) // 8
        elif isinstance(command, Fetch) and isinstance(reply, Batch):
            self.rows_fetched += len(reply.indexes) // 8

    def waited(self, reply: Reply | None, seconds: float) -> None:
        """A parked command was answered; ``reply`` None: with an error."""
        self.waits.observe(seconds)
        if isinstance(reply, Committed):
            self.rows_put += len(reply.indexes) // 8
        elif isinstance(reply, Batch):  # lookups never wait
            self.rows_fetched += len(reply.indexes) // 8


class UnitCounters:
    """The counters of a storage unit that serves clients itself. Bytes that clients read in place, in memory that they
    share with the unit, are opened and not sent; those that they write there are stored and not received."""

    def __init__(self) -> None:
        self.requests = RequestCounters()
        self.bytes_stored = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.bytes_shared_read = 0

    def received(self, message: Any, nbytes: int) -> None:
        """The payload of a request is coming."""
        self.bytes_received += nbytes
        if isinstance(message, Put):
            self.bytes_stored += nbytes

    def served(self, message: Any, seconds: float, reply: Any, payload: Sequence[Any]) -> None:
        self.requests.count(type(message), seconds, False)
        if isinstance(reply, Extents) and reply.lease:
            self.bytes_shared_read += sum(nbytes for _, nbytes in reply.extents)
        for part in payload:
            self.bytes_sent += memoryview(part).nbytes
        if isinstance(message, Alloc):
            self.bytes_stored += message.nbytes
