"""How many rows tasks can take, over all partitions, without a look at all of them in one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_queue.control.partition import Partition

__all__ = ["ReadyRows"]

_MOST_SUBSCRIPTIONS = 64
"""Of a partition."""


class ReadyRows:
    """Each partition counts with what it had when it was last looked at. ``by_task``: of each task, in all of them."""

    def __init__(self) -> None:
        self.by_task: Counter[str] = Counter()
        self._of: dict[str, Counter[str]] = {}
        self._turn: list[str] = []

    @property
    def whole(self) -> int:
        """Of all tasks: a row counts once for each task that can take it."""
        return self.by_task.total()

    def look(self, name: str, partition: Partition | None) -> int:
        """Count a partition again; None: it is gone. Returns what it has."""
        found: Counter[str] = Counter()
        if partition is not None:
            for item in islice(partition.subscriptions.values(), _MOST_SUBSCRIPTIONS):
                found[item.task.name] += item.ready.available
        before = self._of.pop(name, None) or Counter[str]()
        if before != found:
            for task in {*before, *found}:
                self.by_task[task] += found[task] - before[task]
                if not self.by_task[task]:
                    del self.by_task[task]
        if found:
            self._of[name] = found
        return found.total()

    def look_around(self, partitions: Mapping[str, Partition], first: Iterable[str], seconds: float) -> None:
        """Count ``first``, then the other partitions in turn, for so long; the turn goes on with the next call."""
        until = perf_counter() + seconds
        for name in first:
            self.look(name, partitions.get(name))
            if perf_counter() > until:
                return
        self._turn = self._turn or [*partitions, *(name for name in self._of if name not in partitions)]
        while self._turn:
            name = self._turn.pop()
            self.look(name, partitions.get(name))
            if perf_counter() > until:
                return
