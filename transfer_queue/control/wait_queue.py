"""Requests that wait, in the order they came."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from transfer_queue.control.commands import Commit, Fetch
from transfer_queue.sampler import Draw

__all__ = ["Line", "LineKey", "WaitQueue", "Waiter"]


class Waiter:
    """A parked command. ``draw``: what a fetch wants to take, None if a user's sampler decides. ``since`` and
    ``deadline`` are in the host's seconds."""

    __slots__ = ("client", "command", "deadline", "draw", "key", "number", "request", "since", "waits_for_fields")

    def __init__(
        self,
        command: Fetch | Commit,
        client: int,
        request: int,
        since: float,
        deadline: float,
        draw: Draw | None = None,
        key: LineKey | None = None,
    ) -> None:
        self.command = command
        self.client = client
        self.request = request
        self.since = since
        self.deadline = deadline
        self.draw = draw
        self.key = key
        self.number = 0  # in order of arrival
        self.waits_for_fields = False  # its rows are chosen already, but lack a field


Line: TypeAlias = "OrderedDict[tuple[int, int], Waiter]"
"""Waiters of one subscription, first come first."""

LineKey: TypeAlias = "tuple[str, str, tuple[str, ...]]"
"""(partition, task, sorted fields)."""


class WaitQueue:
    """All waiters: fetches by subscription, commits that wait for sample budget, deadlines, and who belongs to whom.

    Waiters outlive the partition they wait for, and may wait for one that does not exist yet.
    """

    def __init__(self) -> None:
        self.commits: Line = OrderedDict()
        self._lines: dict[str, dict[LineKey, Line]] = {}
        self._by_client: dict[int, dict[int, Waiter]] = {}
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._arrivals = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._by_client.values():
            yield from waiters.values()

    def find(self, client: int, request: int) -> Waiter | None:
        return self._by_client.get(client, {}).get(request)

    def of_client(self, client: int) -> list[Waiter]:
        return list(self._by_client.get(client, {}).values())

    def lines(self, partition: str) -> dict[LineKey, Line]:
        return self._lines.get(partition, {})

    def waiting_for(self, partition: str) -> int:
        return sum(len(line) for line in self.lines(partition).values())

    def add(self, waiter: Waiter) -> Line:
        """Returns the line it joined."""
        if waiter.key is None:
            line = self.commits
        else:
            lines = self._lines.setdefault(waiter.key[0], {})
            found = lines.get(waiter.key)
            line = lines[waiter.key] = OrderedDict() if found is None else found
        line[waiter.client, waiter.request] = waiter
        self._by_client.setdefault(waiter.client, {})[waiter.request] = waiter
        self._count += 1
        self._arrivals += 1
        waiter.number = self._arrivals
        if waiter.deadline < math.inf:
            heapq.heappush(self._deadlines, (waiter.deadline, waiter.number, waiter))
        return line

    def remove(self, waiter: Waiter) -> None:
        own = self._by_client[waiter.client]
        del own[waiter.request]
        if not own:
            del self._by_client[waiter.client]
        self._count -= 1
        if waiter.key is None:
            del self.commits[waiter.client, waiter.request]
        else:
            lines = self._lines[waiter.key[0]]
            line = lines[waiter.key]
            del line[waiter.client, waiter.request]
            if not line:  # subscriptions keep the empty line; `add` makes a new one and hands it to them
                del lines[waiter.key]
                if not lines:
                    del self._lines[waiter.key[0]]
        if len(self._deadlines) > 2 * self._count + 64:
            self._deadlines = [entry for entry in self._deadlines if self._is_live(entry[2])]
            heapq.heapify(self._deadlines)

    def _is_live(self, waiter: Waiter) -> bool:
        return self.find(waiter.client, waiter.request) is waiter

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, waiter = self._deadlines[0]
            if self._is_live(waiter):
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def expired(self, now: float) -> Iterator[Waiter]:
        """Waiters whose deadline has come, soonest first; the caller removes each."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            yield self._deadlines[0][2]
