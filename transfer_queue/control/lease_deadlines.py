"""The deadlines of all leases of a controller."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from transfer_queue.control.arrays import Rows
from transfer_queue.control.lease import Lease
from transfer_queue.control.partition import Partition
from transfer_queue.control.subscription import Task

__all__ = ["LeaseDeadlines"]


class LeaseDeadlines:
    """Gives out numbers and knows deadlines; which leases there are is kept with their tasks.

    ``now``: the host's clock when it last said. ``seconds``: for fetches that say nothing; 0: no lease.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self._next = 1
        self._deadlines: list[tuple[float, int, Lease, Task, Partition]] = []
        self._prune_at = 64

    @property
    def next_number(self) -> int:
        """What the next lease is called."""
        return self._next

    def grant(
        self, partition: Partition, task: Task, client: int, rows: Rows, seconds: float, dealt: bool, number: int = 0
    ) -> Lease:
        """A lease of the ordinals ``rows``, which the caller puts on them. ``number``: what it had in a former life."""
        number = number or self._next
        self._next = max(self._next, number) + 1
        lease = Lease(number, client, seconds, self.now + seconds, rows, dealt)
        if lease.deadline < math.inf:
            heapq.heappush(self._deadlines, (lease.deadline, number, lease, task, partition))
            if len(self._deadlines) >= self._prune_at:
                self._deadlines = [entry for entry in self._deadlines if _is_live(entry[2], entry[3])]
                heapq.heapify(self._deadlines)
                self._prune_at = 64 + 2 * len(self._deadlines)
        return lease

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, lease, task, _ = self._deadlines[0]
            if _is_live(lease, task):
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def expired(self) -> Iterator[tuple[Partition, Task, Lease]]:
        """Leases whose time is up, soonest first; the caller ends each."""
        while (deadline := self.next_deadline()) is not None and deadline <= self.now:
            _, _, lease, task, partition = self._deadlines[0]
            yield partition, task, lease

    def restart(self) -> None:
        """All deadlines count from now on: the clock is another one."""
        entries = [entry for entry in self._deadlines if _is_live(entry[2], entry[3])]
        for _, _, lease, _, _ in entries:
            lease.deadline = self.now + lease.seconds
        self._deadlines = [(lease.deadline, number, lease, task, part) for _, number, lease, task, part in entries]
        heapq.heapify(self._deadlines)


def _is_live(lease: Lease, task: Task) -> bool:
    return task.leases.get(lease.number) is lease
