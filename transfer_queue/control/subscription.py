"""Subscriptions: what one task may still fetch, kept up to date as rows become ready."""

from __future__ import annotations

import numpy as np

from transfer_queue.control.arrays import Rows, as_positions
from transfer_queue.control.column_groups import ColumnGroup, Selection
from transfer_queue.control.lease import Lease
from transfer_queue.control.ready import ReadyQueue
from transfer_queue.control.row_states import FREE, Transition
from transfer_queue.control.schema import PutSchema
from transfer_queue.control.sparse import SparseColumn
from transfer_queue.control.wait_queue import Line

__all__ = ["Layout", "Subscription", "Task"]


class Task:
    """A consumer of a partition. ``taken``: the state of each row for this task, see `row_states`.

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
        """Return whether the task has no state, like a task that was never named."""
        return not self.subscriptions and not self.batches and self.taken.is_empty

    @property
    def nbytes(self) -> int:
        """Bytes of the state per row."""
        return self.taken.nbytes + (0 if self.lease is None else self.lease.nbytes)

    def move(self, rows: Rows, transition: Transition) -> None:
        """Change the state of rows, each of which is in one of the transition's sources."""
        self.taken[rows] = transition.target

    def end_leases(self, rows: Rows) -> None:
        """The rows are under no lease any more; a lease without rows is over."""
        assert self.lease is not None
        numbers, counts = np.unique(self.lease[rows], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number:
                lease = self.leases[number]
                lease.left -= count
                if not lease.left:
                    del self.leases[number]
        self.lease[rows] = 0
        if not self.leases:
            self.lease = None

    def forget(self) -> None:
        """Forget all taken rows."""
        self.cleared = 0
        self.taken.clear()
        self.batches.clear()
        self.lease = None
        self.leases.clear()

    def was_dealt(self, batch: int | str, ranks: int) -> bool:
        """Return whether one of ``ranks`` ranks got rows for this batch."""
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

    def enter(self, rows: Rows, others: list[ColumnGroup], fresh: bool) -> None:
        """Add rows whose fields were written.

        Args:
            rows: The rows; only those are added that have the column groups ``others`` too.
            others: The column groups that this write did not cover.
            fresh: The rows are new, so that no task has taken them.
        """
        if isinstance(rows, slice):
            if rows.stop - rows.start == 1:
                position = rows.start
                for column_group in others:
                    if column_group.slot.items[position] <= 0:
                        return
                if not self.task.taken.item(position):
                    self.ready.add(rows)
                return
            if fresh and not others:
                self.ready.add(rows)
                return
        enters = self.task.taken[rows] == FREE
        for column_group in others:
            enters &= column_group.slot.array[rows] > 0
        self.ready.add(rows if bool(enters.all()) else as_positions(rows)[enters])


class Layout:
    """Everything a put with a given list of fields needs to know about the partition, worked out once.

    ``subscriptions``: those that want one of the fields, each with the column groups it wants besides.
    """

    __slots__ = ("column_groups", "schema", "subscriptions")

    def __init__(
        self,
        schema: PutSchema,
        column_groups: list[ColumnGroup],
        subscriptions: list[tuple[Subscription, list[ColumnGroup]]],
    ) -> None:
        self.schema = schema
        self.column_groups = column_groups
        self.subscriptions = subscriptions
