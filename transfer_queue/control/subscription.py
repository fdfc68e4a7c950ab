"""Subscriptions: what one task may still fetch, kept up to date as rows become ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.control.arrays import Rows, as_positions
from transfer_queue.control.families import Family, Selection
from transfer_queue.control.leases import Lease
from transfer_queue.control.ready import ReadyQueue
from transfer_queue.control.sparse import SparseColumn

if TYPE_CHECKING:
    from transfer_queue.control.waiters import Line

__all__ = ["CONSUMED", "FREE", "LEASED", "PROMISED", "Subscription", "Task"]

FREE = 0
CONSUMED = 1
PROMISED = 2
"""Drawn together with another rank's batch; becomes CONSUMED when its own rank asks."""
LEASED = 3
"""Handed out and to be acknowledged."""


class Task:
    """A consumer of a partition. ``taken``: FREE, CONSUMED, PROMISED or LEASED, a row each.

    ``batches``: (rank, batch index) -> ordinals of the rows which that rank gets each time it asks for that batch.
    ``leases`` by number; ``lease``: the number of the lease that each row is under, 0 for none. None without leases.
    """

    __slots__ = ("batches", "cleared", "deals", "last_fetch", "lease", "leases", "name", "subscriptions", "taken")

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken = SparseColumn(np.uint8)
        self.batches: dict[tuple[int, int | str], Rows] = {}
        self.cleared = 0  # consumed rows that were cleared since; for people, not kept over a restart
        self.last_fetch = 0.0  # when a fetch last came or was answered, or rows were acknowledged; on the host's clock
        self.deals = 0  # entries ever made in ``batches``
        self.subscriptions: list[Subscription] = []
        self.lease: SparseColumn | None = None
        self.leases: dict[int, Lease] = {}

    @property
    def is_blank(self) -> bool:
        """Whether the task has no state, like a task that was never named."""
        return not self.subscriptions and not self.batches and self.taken.is_empty

    @property
    def nbytes(self) -> int:
        """Bytes of the state per row."""
        return self.taken.nbytes + (0 if self.lease is None else self.lease.nbytes)

    def forget(self) -> None:
        """Forget all taken rows."""
        self.cleared = 0
        self.taken.clear()
        self.batches.clear()
        self.lease = None
        self.leases.clear()

    def was_dealt(self, batch: int | str, ranks: int) -> bool:
        """Whether one of ``ranks`` ranks got rows for this batch."""
        return any((rank, batch) in self.batches for rank in range(ranks))


class Subscription:
    """Rows whose fields ``names`` are all there and that ``task`` has not taken: ``ready`` holds exactly those.

    ``waiting``: the parked fetches. ``deals_seen``: the task's deals when they were last looked through, ``lacking``:
    whether one of them waits for fields of rows that it was dealt.
    """

    __slots__ = ("deals_seen", "lacking", "last_use", "names", "ready", "selection", "task", "waiting")

    def __init__(self, task: Task, names: tuple[str, ...], selection: Selection, ready: ReadyQueue) -> None:
        self.task = task
        self.names = names
        self.selection = selection
        self.ready = ready
        self.waiting: Line | None = None
        self.deals_seen = 0
        self.lacking = False
        self.last_use = 0

    def enter(self, rows: Rows, others: list[Family], fresh: bool) -> None:
        """Fields of ``rows`` were written; take in those that have the families ``others`` too. ``fresh``: the rows
        are new, so that nobody can have taken them."""
        if isinstance(rows, slice):
            if rows.stop - rows.start == 1:
                position = rows.start
                for family in others:
                    if family.slot.items[position] <= 0:
                        return
                if not self.task.taken.item(position):
                    self.ready.add(rows)
                return
            if fresh and not others:
                self.ready.add(rows)
                return
        enters = self.task.taken[rows] == FREE
        for family in others:
            enters &= family.slot.array[rows] > 0
        self.ready.add(rows if bool(enters.all()) else as_positions(rows)[enters])
