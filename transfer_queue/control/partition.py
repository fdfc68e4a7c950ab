"""One partition: its rows, what is known of each, and every way in which that changes."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.arrays import Ints, Rows, Table, as_positions, compact, row_count, to_runs
from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.column_groups import ColumnGroup, FieldTable
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.effects import EffectLog
from transfer_queue.control.indexes import IndexMap, IndexSpace, decode_indexes
from transfer_queue.control.key_table import KeyTable
from transfer_queue.control.lease import Lease
from transfer_queue.control.ordered import make_ordered_queue
from transfer_queue.control.ready import ReadyQueue, make_ready_queue
from transfer_queue.control.records import (
    BatchAssigned,
    CellsWritten,
    ConsumptionReset,
    LeaseEnded,
    PartitionEnded,
    RowsCleared,
    RowsConsumed,
    RowsCreated,
    RowsLeased,
    TagsMerged,
)
from transfer_queue.control.row_states import (
    CONSUME,
    CONSUMED,
    FORGET,
    FREE,
    GIVE_BACK,
    GIVE_BACK_BATCH,
    LEASE,
    Transition,
)
from transfer_queue.control.schema import FieldSchema, schema_key
from transfer_queue.control.sparse import SparseColumn
from transfer_queue.control.subscription import Layout, Subscription, Task
from transfer_queue.sampler import ByPriority, ByWeight

__all__ = ["Partition", "Queueing"]

_MAX_SUBSCRIPTIONS = 256
_FEW_SUBSCRIPTIONS = 16
_MAX_READY_BYTES = 64 << 20
"""Above this, at one byte per row, few subscriptions are kept; a task that returns then scans all rows."""
_MAX_LAYOUTS = 128
_MAX_ASKED = 1024
_TRIM_FROM = 1024
_NO_TAG: dict[str, Any] = {}


class Queueing(NamedTuple):
    """The order in which rows are drawn: in whole groups of ``group`` consecutive ones, lowest first, or one by one in
    ``order``."""

    group: int = 1
    order: ByPriority | ByWeight | None = None


class Partition:
    """Rows are addressed by *position*: their ordinal (place in the order of creation) less ``base``, the number of
    rows already dropped from the front. Positions hold within one command; what is kept across commands is ordinals.

    The methods below "changes" are the only ones that change state. They take checked arguments and cannot fail.
    """

    def __init__(self, name: str, space: IndexSpace, blocks: BlockTable, log: EffectLog, queueing: Queueing) -> None:
        self.name = name
        self.indexes = IndexMap(space)
        self.blocks = blocks
        self.log = log
        self.queueing = queueing
        self.base = 0
        self.rows = 0  # that exist
        self.nbytes = 0
        self.mixed: int | None = None  # ordinal of the first group that two clients created
        self._group_client = 0
        self.ended = False  # a producer said that no more rows come
        self.table = Table()
        self.alive = self.table.add_column(np.uint8)
        self.fields = FieldTable(self.table)
        self.keys = KeyTable()
        self.key_of: list[str | None] | None = None  # by position; None: no row ever had a key
        self.tags: list[dict[str, Any]] = []  # by position, read-only; empty: no row ever had tags
        self.tasks: dict[str, Task] = {}
        self.subscriptions: dict[tuple[str, tuple[str, ...]], Subscription] = {}
        self._asked: dict[tuple[str, tuple[str, ...]], Subscription] = {}
        self._layouts: dict[bytes, Layout] = {}
        self._uses = 0

    # -------------------------------------------------------------------------------------------------- questions

    def find_keys(self, keys: list[str]) -> Ints:
        """Positions; -1 for unknown keys."""
        return np.array(self.keys.find(keys, self.base - 1), np.int64) - self.base

    def find_indexes(self, raw: bytes) -> Ints:
        """Positions of i64 bytes; negative for rows that do not exist."""
        if len(raw) == 8:
            position = self.indexes.ordinal(int.from_bytes(raw, "little", signed=True)) - self.base
            exists = 0 <= position < self.table.used and self.alive.items[position]
            return np.array([position if exists else -1], np.int64)
        return self.find(decode_indexes(raw))

    def find(self, indexes: Ints) -> Ints:
        """Return what `find_indexes` does, from an array."""
        positions = self.indexes.ordinals(indexes) - self.base
        outside = (positions < 0) | (positions >= self.table.used)
        if bool(outside.any()):
            positions[outside] = 0
            outside |= self.alive.array[positions] == 0
        else:
            outside = self.alive.array[positions] == 0
        positions[outside] = -1
        return positions

    def all_rows(self) -> Rows:
        if self.rows == self.table.used:
            return slice(0, self.rows)
        return compact(np.flatnonzero(self.alive.array[: self.table.used]))

    def encode(self, rows: Rows) -> bytes:
        return self.indexes.encode(rows, self.base)

    def keys_at(self, rows: Rows) -> list[str | None] | None:
        """None if the partition has no keys at all."""
        if self.key_of is None:
            return None
        if isinstance(rows, slice):
            return self.key_of[rows]
        key_of = self.key_of
        return [key_of[position] for position in rows.tolist()]

    def tags_at(self, rows: Rows) -> list[dict[str, Any]]:
        """One a row, read-only; an empty list if the partition has no tags at all."""
        if isinstance(rows, slice):
            return self.tags[rows]
        tags = self.tags
        return [tags[position] for position in rows.tolist()] if tags else []

    def lost_rows(self, rows: Rows, column_groups: list[ColumnGroup]) -> Ints:
        """Return the rows among ``rows`` that lost a cell of these column groups."""
        lost = np.zeros(row_count(rows), np.bool_)
        for column_group in column_groups:
            lost |= column_group.slot.array[rows] < 0
        return as_positions(rows)[lost]

    def count_lost(self) -> int:
        """Number of rows that lost a cell."""
        used = self.table.used
        if all(int(column_group.slot.array[:used].min(initial=0)) >= 0 for column_group in self.fields.column_groups):
            return 0
        return len(self.lost_rows(self.all_rows(), self.fields.column_groups))

    # ---------------------------------------------------------------------------------------------- subscriptions

    def layout(self, fields: list[FieldSchema]) -> Layout:
        """The layout of a put; registers its fields."""
        key = schema_key(fields)
        layout = self._layouts.get(key)
        if layout is None:
            column_groups, changed = self.fields.arrange(field.name for field in fields)
            if changed:
                self._fields_changed()
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            interested = []
            for subscription in self.subscriptions.values():
                wanted = [] if subscription.selection.unknown else subscription.selection.column_groups
                others = [column_group for column_group in wanted if column_group not in column_groups]
                if len(others) < len(wanted):
                    interested.append((subscription, others))
            schema = self.blocks.schemas.share(fields, key)
            layout = self._layouts[schema.key] = Layout(schema, column_groups, interested)
        return layout

    def has_layout(self, fields: list[FieldSchema]) -> bool:
        return schema_key(fields) in self._layouts

    def _fields_changed(self) -> None:
        self._layouts.clear()
        for subscription in self.subscriptions.values():
            subscription.selection = self.fields.select(subscription.names)

    def task(self, name: str) -> Task:
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = Task(name)
        return task

    def drop_if_blank(self, task: Task) -> None:
        """Forget a task without state."""
        if task.is_blank:
            del self.tasks[task.name]

    def subscribe(self, task_name: str, fields: tuple[str, ...]) -> Subscription:
        """The subscription of a task to some fields, filled with what is ready if it is new."""
        self._uses += 1
        subscription = self._asked.get((task_name, fields))
        if subscription is None:
            names = tuple(sorted(set(fields)))
            subscription = self.subscriptions.get((task_name, names))
            if subscription is None:
                subscription = self._add_subscription(task_name, names)
            if len(self._asked) >= _MAX_ASKED:
                self._asked.clear()
            self._asked[task_name, fields] = subscription
        subscription.last_use = self._uses
        return subscription

    def _add_subscription(self, task_name: str, names: tuple[str, ...]) -> Subscription:
        self._shed_subscriptions(self.table.capacity, 1)
        task = self.task(task_name)
        subscription = Subscription(task, names, self.fields.select(names), self._ready_queue())
        self.subscriptions[task.name, names] = subscription
        task.subscriptions.append(subscription)
        self._fill(subscription)
        self._layouts.clear()
        return subscription

    def _shed_subscriptions(self, capacity: int, more: int) -> None:
        """Drop the least recently used subscriptions, so that the rest and ``more`` stay within the bounds at
        ``capacity`` rows. Subscriptions with waiters stay."""
        most = max(_FEW_SUBSCRIPTIONS, min(_MAX_SUBSCRIPTIONS, _MAX_READY_BYTES // capacity))
        excess = len(self.subscriptions) + more - most
        if excess > 0:
            idle = [subscription for subscription in self.subscriptions.values() if not subscription.waiting]
            for subscription in heapq.nsmallest(excess, idle, key=lambda item: item.last_use):
                self._drop_subscription(subscription)
                self.drop_if_blank(subscription.task)

    def _drop_subscription(self, subscription: Subscription) -> None:
        del self.subscriptions[subscription.task.name, subscription.names]
        subscription.task.subscriptions.remove(subscription)
        self._asked.clear()
        self._layouts.clear()

    def _fill(self, subscription: Subscription) -> None:
        """Rebuild the ready queue from the state of the rows."""
        subscription.ready = self._ready_queue()
        if not subscription.selection.unknown:
            subscription.ready.add(compact(np.flatnonzero(self.ready_mask(subscription))))

    def _ready_queue(self) -> ReadyQueue:
        """A queue of the kind that the sampler draws from."""
        group, order = self.queueing
        if order is not None:
            return make_ordered_queue(order, self.table.capacity, self.tags)
        return make_ready_queue(self.table.capacity, group, self.base % group)

    def ready_mask(self, subscription: Subscription) -> NDArray[np.bool_]:
        used = self.table.used
        mask: NDArray[np.bool_] = (self.alive.array[:used] == 1) & (subscription.task.taken[slice(0, used)] == FREE)
        for column_group in subscription.selection.column_groups:
            mask &= column_group.slot.array[:used] > 0
        return mask

    def is_rest_ready(self, subscription: Subscription) -> bool:
        """Return whether no more rows come, and those that the task has not taken have all the fields."""
        if not self.ended:
            return False
        used = self.table.used
        free = (self.alive.array[:used] == 1) & (subscription.task.taken[slice(0, used)] == FREE)
        return int(free.sum()) == len(subscription.ready.members())

    def requeue(self, queueing: Queueing) -> None:
        """Another sampler draws rows from now on."""
        self.queueing = queueing
        for subscription in self.subscriptions.values():
            self._fill(subscription)

    # ---------------------------------------------------------------------------------------------------- changes

    def create(self, count: int, keys: list[str] | None) -> slice:
        """Append rows; ``keys`` are new and distinct."""
        capacity = self.table.capacity
        first = self.table.extend(count)
        if self.table.capacity != capacity:
            self._shed_subscriptions(self.table.capacity, 0)
            for subscription in self.subscriptions.values():
                subscription.ready.resize(self.table.capacity)
        ordinal = first + self.base
        self.indexes.cover(ordinal + count)
        if count == 1:
            self.alive.items[first] = 1
        else:
            self.alive.array[first : first + count] = 1
        self.rows += count
        if keys is not None:
            if self.key_of is None:
                self.key_of = [None] * first
            self.key_of.extend(keys)
            self.keys.add(keys, range(ordinal, ordinal + count))
        elif self.key_of is not None:
            self.key_of.extend([None] * count)
        if self.tags:
            self.tags.extend([_NO_TAG] * count)
        if self.log.journaling:
            self.log.record(RowsCreated(self.name, count, keys))
        return slice(first, first + count)

    def note_groups(self, created: slice, client: int, known: Ints | None) -> bool:
        """``client`` created rows: is a group of consecutive rows the work of two clients? Not kept over a restart.

        A client takes over a group whose earlier rows are all in its put, as ``known`` positions: they are of one
        prompt then, whichever process put them first. Returns whether these rows continue a group that an earlier put
        began."""
        group = self.queueing.group
        first, end = created.start + self.base, created.stop + self.base
        if first % group and self._group_client not in (0, client):
            begun = slice(max(first - first % group - self.base, 0), created.start)
            earlier = np.flatnonzero(self.alive.array[begun]) + begun.start
            if known is not None and len(earlier) and bool(np.isin(earlier, known).all()):
                self._group_client = client
            elif self.mixed is None:
                self.mixed = first - first % group
        if end % group and (first % group == 0 or first // group != end // group):
            self._group_client = client
        return bool(first % group)

    def renumber_client(self, former: int, client: int) -> None:
        """The client ``former`` goes on under another number."""
        if self._group_client == former:
            self._group_client = client

    def write(
        self, rows: Rows, fields: list[FieldSchema], refs: list[BlockRef], lengths: dict[str, bytes], fresh: bool
    ) -> list[Subscription]:
        """The fields of ``rows`` lie in the blocks ``refs`` now. ``fresh``: the rows were created for this put.
        Returns the subscriptions that may have grown."""
        layout = self.layout(fields)
        if not fresh:
            for column_group in layout.column_groups:
                self.nbytes -= self.blocks.release(column_group.slot.array[rows], len(column_group.fields))
        if isinstance(rows, slice):
            slots = self._add_blocks(layout, refs, rows.start + self.base)
            if rows.stop - rows.start == 1:
                assert isinstance(slots, int)
                for column_group in layout.column_groups:
                    column_group.slot.items[rows.start] = slots
            else:
                for column_group in layout.column_groups:
                    column_group.slot.array[rows] = slots
        else:
            slots = self._add_blocks(layout, refs, None)
            in_block = np.concatenate([np.arange(ref.rows, dtype=np.int32) for ref in refs])
            for column_group in layout.column_groups:
                column_group.slot.array[rows] = slots
                self.fields.row_column(column_group).array[rows] = in_block
        if lengths or self.fields.lengths:
            self.fields.write_lengths(layout.schema.by_name, lengths, rows, fresh)
        for subscription, others in layout.subscriptions:
            subscription.enter(rows, others, fresh)
        if self.log.journaling:
            self.log.record(CellsWritten(self.name, to_runs(rows, self.base), fields, refs, lengths))
        return [subscription for subscription, _ in layout.subscriptions]

    def _add_blocks(self, layout: Layout, refs: list[BlockRef], first: int | None) -> NDArray[np.int32] | int:
        """Slots of the rows of a put, one number if they are all the same. ``first``: ordinal of its first row, if its
        rows are consecutive."""
        slots = []
        for ref in refs:
            start = -1 if first is None else first + ref.row_start
            slots.append(self.blocks.add(ref, start, ref.rows * len(layout.schema.by_name), layout.schema))
            self.nbytes += ref.nbytes
        if len(slots) == 1:
            return slots[0]
        return np.repeat(np.array(slots, np.int32), [ref.rows for ref in refs])

    def merge_tags(self, rows: Rows, tags: list[dict[str, Any]]) -> None:
        """Top-level entries replace those of the same name. Stored tags are never changed in place, so that records and
        replies share them: a put of 20,000 rows has no time for copies."""
        if not self.tags and any(tags):
            self.tags.extend([_NO_TAG] * self.table.used)  # the same list: ready queues have it
        if isinstance(rows, slice) and not any(self.tags[rows]):
            if self.tags:
                self.tags[rows] = tags
        else:
            for position, tag in zip(as_positions(rows).tolist(), tags, strict=True):
                if tag:
                    old = self.tags[position]
                    self.tags[position] = {**old, **tag} if old else tag
        if self.queueing.order is not None:
            for subscription in self.subscriptions.values():
                subscription.ready.retag(rows)
        if self.log.journaling:
            self.log.record(TagsMerged(self.name, to_runs(rows, self.base), tags))

    def end(self) -> None:
        """No more rows come."""
        self.ended = True
        if self.log.journaling:
            self.log.record(PartitionEnded(self.name))

    def take(
        self, task: Task, rows: Rows, drawn_from: Subscription | None = None, *, how: Transition = CONSUME
    ) -> None:
        """``task`` consumed the rows, or reserved them. ``drawn_from``: the subscription whose queue they already
        left."""
        if task.leases:
            task.end_leases(rows)
        task.move(rows, how)
        for subscription in task.subscriptions:
            if subscription is not drawn_from:
                subscription.ready.discard(rows)
        if self.log.journaling:
            self.log.record(RowsConsumed(self.name, task.name, to_runs(rows, self.base), how.target))

    def lease(self, task: Task, rows: Rows, lease: Lease, drawn_from: Subscription | None = None) -> None:
        """``task`` took the rows and is to acknowledge them, see ``take``."""
        if task.leases:
            task.end_leases(rows)
        if task.lease is None:
            task.lease = SparseColumn(np.int64)
        task.move(rows, LEASE)
        task.lease[rows] = lease.number
        task.leases[lease.number] = lease
        for subscription in task.subscriptions:
            if subscription is not drawn_from:
                subscription.ready.discard(rows)
        if self.log.journaling:
            self.log.record(
                RowsLeased(
                    self.name,
                    task.name,
                    lease.number,
                    lease.client,
                    lease.seconds,
                    to_runs(rows, self.base),
                    lease.dealt,
                )
            )

    def returning(self, task: Task, lease: Lease) -> Rows:
        """Return the rows that go back when the lease ends now: those under it, and whole groups if rows are drawn in
        groups."""
        assert task.lease is not None
        positions = as_positions(lease.rows) - self.base
        positions = positions[positions >= 0]
        rows: Ints = positions[task.lease[positions] == lease.number]
        group = self.queueing.group
        if group > 1 and not lease.dealt:
            first = (np.unique((rows + self.base) // group) * group - self.base)[:, None]
            whole = (first + np.arange(group)).ravel()
            whole = whole[(whole >= 0) & (whole < self.table.used)]
            acknowledged = whole[(task.taken[whole] == CONSUMED) & (self.alive.array[whole] == 1)]
            rows = np.union1d(rows, acknowledged)
        return compact(np.sort(rows))

    def end_lease(self, task: Task, lease: Lease, rows: Rows) -> list[Subscription]:
        """The lease is over and ``rows`` go back. Returns the subscriptions that may have grown."""
        task.end_leases(rows)
        task.leases.pop(lease.number, None)
        task.move(rows, GIVE_BACK_BATCH if lease.dealt else GIVE_BACK)
        if self.log.journaling:
            self.log.record(LeaseEnded(self.name, task.name, lease.number, to_runs(rows, self.base)))
        if lease.dealt:
            return []
        grown = [subscription for subscription in task.subscriptions if not subscription.selection.unknown]
        for subscription in grown:
            subscription.enter(rows, subscription.selection.column_groups, False)
        return grown

    def assign(self, task: Task, rank: int, batch: int | str, rows: Rows) -> None:
        """Remember what a rank gets for one of its batches."""
        task.deals += 1
        task.batches[rank, batch] = (
            slice(rows.start + self.base, rows.stop + self.base) if isinstance(rows, slice) else rows + self.base
        )
        if self.log.journaling:
            self.log.record(BatchAssigned(self.name, task.name, rank, batch, to_runs(rows, self.base)))

    def reset(self, task_name: str | None) -> None:
        """Reset one task or all tasks to no consumed rows, and forget the tasks without waiters."""
        named = self.tasks.values() if task_name is None else filter(None, [self.tasks.get(task_name)])
        for task in list(named):
            task.forget()
            for subscription in list(task.subscriptions):
                if subscription.waiting:
                    self._fill(subscription)
                else:
                    self._drop_subscription(subscription)
            self.drop_if_blank(task)
        if self.log.journaling:
            self.log.record(ConsumptionReset(self.name, task_name))

    def clear(self, rows: Rows) -> None:
        """Forget existing, distinct rows."""
        if self.log.journaling:
            self.log.record(RowsCleared(self.name, to_runs(rows, self.base)))
        for column_group in self.fields.column_groups:
            self.nbytes -= self.blocks.release(column_group.slot.array[rows], len(column_group.fields))
            column_group.slot.array[rows] = 0
        for column in self.fields.lengths.values():
            column.array[rows] = 0
        for subscription in self.subscriptions.values():
            subscription.ready.discard(rows)
        for task in self.tasks.values():
            if task.leases:
                task.end_leases(rows)
            if not task.taken.is_empty:
                task.cleared += int((task.taken[rows] == CONSUMED).sum())
                task.move(rows, FORGET)
        self.alive.array[rows] = 0
        self.rows -= row_count(rows)
        positions = as_positions(rows).tolist()
        if self.key_of is not None:
            key_of = self.key_of
            self.keys.remove([key for position in positions if (key := key_of[position]) is not None])
            for position in positions:
                key_of[position] = None
        if self.tags:
            for position in positions:
                self.tags[position] = _NO_TAG
        self._trim()

    def drop(self) -> None:
        """Free all blocks: the partition itself goes away, and its leases with it."""
        for task in self.tasks.values():
            task.leases.clear()
        used = self.table.used
        for column_group in self.fields.column_groups:
            self.blocks.release(column_group.slot.array[:used], len(column_group.fields))

    def _trim(self) -> None:
        """Drop cleared rows from the front once they are half of all; each row is moved O(1) times on average."""
        used = self.table.used
        if used < _TRIM_FROM or self.rows * 2 > used:
            return
        gone = int(self.alive.array[:used].view(np.bool_).argmax()) if self.rows else used
        if gone * 2 < used:
            return
        self.table.drop_front(gone)
        self.base += gone
        if self.key_of is not None:
            del self.key_of[:gone]
        del self.tags[:gone]
        for task in list(self.tasks.values()):
            task.taken.drop_front(gone)
            if task.lease is not None:
                task.lease.drop_front(gone)
            for key, rows in task.batches.items():
                if _last(rows) < self.base:
                    task.batches[key] = slice(0, 0)  # that it was dealt must be remembered, its rows need not
            self.drop_if_blank(task)
        for subscription in self.subscriptions.values():
            self._fill(subscription)

    # ----------------------------------------------------------------------------------------------- storage units

    def lose(self, lost: NDArray[np.bool_]) -> None:
        """The blocks whose slots are marked in ``lost`` are gone with their unit."""
        for column_group in self.fields.column_groups:
            slots = column_group.slot.array[: self.table.used]
            hit = np.flatnonzero(lost[slots.clip(0)])
            if len(hit):
                slots[hit] = -slots[hit]
                for subscription in self.subscriptions.values():
                    if column_group in subscription.selection.column_groups:
                        subscription.ready.discard(compact(hit))

    def restore(self, found: NDArray[np.bool_]) -> list[Subscription]:
        """The blocks marked in ``found`` are there again. Returns the subscriptions that may have grown."""
        grown: dict[int, Subscription] = {}
        for column_group in self.fields.column_groups:
            slots = column_group.slot.array[: self.table.used]
            hit = np.flatnonzero(found[(-slots).clip(0)])
            slots[hit] = -slots[hit]
            for subscription in self.subscriptions.values():
                if (
                    len(hit)
                    and column_group in subscription.selection.column_groups
                    and not subscription.selection.unknown
                ):
                    subscription.enter(compact(hit), subscription.selection.column_groups, False)
                    grown[id(subscription)] = subscription
        return list(grown.values())


def _last(ordinals: Rows) -> int:
    return int(ordinals.stop - 1 if isinstance(ordinals, slice) else ordinals.max())
