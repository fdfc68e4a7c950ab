"""Where samplers meet the state: turns a fetch into rows taken and a batch to answer with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.control.arrays import Ints, Rows, as_positions, compact, row_count
from transfer_queue.control.batches import EMPTY_BATCH, make_batch
from transfer_queue.control.commands import Batch, Fetch
from transfer_queue.control.lease_deadlines import LeaseDeadlines
from transfer_queue.control.ordered import OrderedQueue, ReadyPriorities, ReadyWeights
from transfer_queue.control.partition import Partition, Queueing
from transfer_queue.control.plain import copy_plain, unpack_arrays
from transfer_queue.control.ready import ReadyGroups, ReadyRows
from transfer_queue.control.row_states import CONSUMED, RESERVE
from transfer_queue.control.subscription import Subscription
from transfer_queue.errors import DataLostError, SamplerError, StorageKeyNotFoundError
from transfer_queue.sampler import BaseSampler, Draw, PlannedSampler

__all__ = ["Outcome", "PartitionView", "SamplerAdapter"]

FAULTS = (Exception, SystemExit, GeneratorExit)
"""What a user's code may raise and must not reach anybody but the caller of the moment; not a Ctrl-C."""


class PartitionView:
    """The view of a partition that a user's sampler gets as ``partition``."""

    def __init__(self, partition: Partition, production_done: bool) -> None:
        self._partition = partition
        self.partition_id = partition.name
        self.production_done = production_done
        """No more rows come, and all that the task has not taken are ready."""

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Index -> a copy of its tag; rows that do not exist are left out."""
        indexes = np.array(global_indices, np.int64)
        positions = self._partition.find(indexes)
        known = positions >= 0
        tags = self._partition.tags_at(positions[known]) or [{} for _ in range(int(known.sum()))]
        return dict(zip(indexes[known].tolist(), map(copy_plain, tags), strict=True))


class Outcome:
    """Why a fetch got nothing: its rows are chosen but lack fields, or there are too few rows."""

    __slots__ = ("waits_for_fields",)

    def __init__(self, waits_for_fields: bool) -> None:
        self.waits_for_fields = waits_for_fields


_TOO_FEW = Outcome(False)
_LACKS_FIELDS = Outcome(True)


class SamplerAdapter:
    """Draws with one sampler. Built-in samplers say what they take (`PlannedSampler.plan`) and the subscription's ready
    queue gives it; what ranks have been dealt is kept with the task. A user's sampler is shown the list of ready rows.
    """

    def __init__(self, sampler: BaseSampler, leases: LeaseDeadlines) -> None:
        self.sampler = sampler
        self._leases = leases
        self.name = type(sampler).__name__
        overridden = type(sampler).sample is not PlannedSampler.sample
        plans = isinstance(sampler, PlannedSampler) and not overridden and not sampler.shown_rows
        self.planned = sampler if isinstance(sampler, PlannedSampler) and plans else None
        self.queueing = Queueing(self.planned.group, self.planned.order) if self.planned else Queueing()
        self.reads_tags = self.planned is None or self.planned.reads_tags

    def plan(self, command: Fetch) -> Draw | None:
        """Return what the fetch will take; None if a user's sampler decides."""
        if self.planned is None:
            return None
        try:
            draw = self.planned.plan(command.batch_size, command.params)
        except FAULTS as error:  # boundary: subclasses are a user's code
            raise SamplerError(f"{self.name}: {_text(error)}") from error
        if not command.batch_size and draw.tokens is None:
            raise SamplerError(f"{self.name} goes by numbers of rows, not by tokens; give batch_size")
        if draw.rows < 1 or draw.rows % self.queueing.group:
            raise SamplerError(f"{self.name} plans to take {draw.rows} rows; it takes groups of {self.queueing.group}")
        return draw

    def forget(self, partition: str) -> None:
        """The partition is about to be cleared, or consumption reset."""
        try:
            self.sampler.clear_cache(partition)
        except FAULTS as error:  # boundary to a user's code
            raise SamplerError(f"{self.name}.clear_cache raised {type(error).__name__}: {_text(error)}") from error

    def draw(
        self, partition: Partition, subscription: Subscription, command: Fetch, draw: Draw | None, may_take: bool
    ) -> Batch | Outcome:
        """The batch, or why there is none. ``may_take``: nobody is ahead, so that rows may be taken."""
        subscription.task.last_fetch = self._leases.now
        if draw is None:
            return self._ask(partition, subscription, command)
        if draw.batch is not None:
            known = subscription.task.batches.get((draw.rank, draw.batch))
            if known is not None:
                return self._repeat(partition, subscription, command, draw, known)
            if draw.tokens is not None and subscription.task.was_dealt(draw.batch, draw.ranks):
                return EMPTY_BATCH  # the last rows went to other ranks
        if not may_take:
            return _TOO_FEW
        if partition.mixed is not None:
            group = self.queueing.group
            raise SamplerError(
                f"{self.name}: the group of rows {partition.mixed} to {partition.mixed + group - 1} of partition "
                f"{partition.name!r} (counted from 0 as they were created) was begun by one client and continued by "
                "another, so that it mixes prompts. Create the rows of a group in one put, or let the rows of a prompt "
                f"share a tag and name it: GRPOGroupNSampler({group}, group_tag=...); a process that replaces another "
                "one puts the whole group again, by its keys. Then clear the partition"
            )
        self._give_up_stale(partition, subscription, draw)
        if subscription.ready.available < draw.needs:
            return _TOO_FEW
        taken = self._take(partition, subscription, draw)
        if taken is None:
            return _TOO_FEW
        rows, shares = taken
        if draw.batch is not None:
            rows = self._deal(partition, subscription, draw, rows, shares)
        if draw.seed is None:
            self._hand_out(partition, subscription, command, rows, draw.batch is not None)
        return make_batch(partition, rows, subscription.selection, locate=command.locate)

    def _hand_out(
        self, partition: Partition, subscription: Subscription, command: Fetch, rows: Rows, dealt: bool = False
    ) -> None:
        """Rows that left the queue of ``subscription`` are consumed or leased."""
        task = subscription.task
        seconds = self._leases.seconds if command.lease_s is None else command.lease_s
        if not seconds > 0 or not row_count(rows):
            partition.take(task, rows, subscription)
            return
        ordinals: Rows = (
            slice(rows.start + partition.base, rows.stop + partition.base)
            if isinstance(rows, slice)
            else rows + partition.base
        )
        lease = self._leases.grant(partition, task, partition.log.origin[0], ordinals, seconds, dealt)
        partition.lease(task, rows, lease, subscription)

    def _give_up_stale(self, partition: Partition, subscription: Subscription, draw: Draw) -> None:
        """Rows older than the draw allows are consumed, whether or not there are enough of the others."""
        ready = subscription.ready
        if draw.oldest is None or not isinstance(ready, ReadyPriorities) or ready.unusable:
            return
        if row_count(stale := ready.stale(draw.oldest)):
            partition.take(subscription.task, stale, subscription)

    def _take(
        self, partition: Partition, subscription: Subscription, draw: Draw
    ) -> tuple[Rows, list[list[int]] | None] | None:
        """Rows that left the ready queue, and what each rank gets of them if that is settled; None if there are too
        few."""
        ready = subscription.ready
        if type(ready) is ReadyRows and draw.tokens is None:  # most often; isinstance of a protocol's class is slow
            return ready.take(draw.rows), None
        if isinstance(ready, OrderedQueue) and ready.unusable:
            position = min(ready.unusable)
            index = partition.indexes.index(position + partition.base)
            names = " and ".join(repr(name) for name in self.queueing.order or ())
            raise SamplerError(
                f"{self.name}: tags {names} of row {index} must be finite numbers, a weight not below 0; got "
                f"{(partition.tags[position] if partition.tags else {})!r:.200}; correct the tag or clear the row"
            )
        if isinstance(ready, ReadyWeights):
            picked = ready.pick(draw.rows, draw.seed or 0)
            return None if picked is None else (picked, None)
        if isinstance(ready, ReadyPriorities):
            oldest = -math.inf if draw.oldest is None else draw.oldest
            return None if ready.count_since(oldest) < draw.rows else (ready.take(draw.rows, oldest), None)
        assert isinstance(ready, ReadyRows | ReadyGroups)
        if draw.tokens is not None:
            return self._fit(partition, ready, draw._replace(rest=partition.is_rest_ready(subscription)))
        return ready.take(draw.rows), None

    def _fit(
        self, partition: Partition, ready: ReadyRows | ReadyGroups, draw: Draw
    ) -> tuple[Rows, list[list[int]]] | None:
        """As `_take`, within a budget of tokens."""
        assert self.planned is not None
        positions = ready.peek(draw.rows)
        try:
            fitted = self.planned.fit(_lengths(partition, positions), draw)
        except FAULTS as error:  # boundary: tags and subclasses are a user's
            raise SamplerError(f"{self.name}: {_text(error)}") from error
        if fitted is None:
            return None
        shares = [[int(positions[number]) for number in share] for share in fitted]
        rows = compact(np.sort(np.array([row for share in shares for row in share], np.int64)))
        ready.discard(rows)
        return rows, shares

    def shortfall(self, partition: Partition, subscription: Subscription, command: Fetch) -> str:
        """Return what is missing besides rows."""
        draw = self.plan(command) if self.planned is not None and self.queueing.order is None else None
        ready = subscription.ready
        if draw is None or draw.tokens is None or not isinstance(ready, ReadyRows | ReadyGroups):
            return ""
        tokens = sum(_lengths(partition, ready.peek(draw.rows)))
        return f"they hold {tokens:g} of {draw.tokens * draw.ranks:g} tokens (flush takes them as they are)"

    def _deal(
        self, partition: Partition, subscription: Subscription, draw: Draw, rows: Rows, shares: list[list[int]] | None
    ) -> Rows:
        """Divide drawn rows among ranks; returns the share of the asking one."""
        task = subscription.task
        assert draw.batch is not None
        if draw.ranks == 1:
            partition.assign(task, draw.rank, draw.batch, rows)
            return rows
        if shares is None:
            try:
                shares = self._shares(partition, draw, as_positions(rows).tolist())
            except SamplerError:
                subscription.ready.add(rows)
                raise
        own: Rows = slice(0, 0)
        for rank, share in enumerate(shares):
            if not share:
                continue
            dealt = compact(np.array(share, np.int64))
            partition.assign(task, rank, draw.batch, dealt)
            if rank == draw.rank:
                own = dealt
            else:
                partition.take(task, dealt, subscription, how=RESERVE)
        return own

    def _shares(self, partition: Partition, draw: Draw, positions: list[int]) -> list[list[int]]:
        assert self.planned is not None
        try:
            shares = self.planned.share(positions, draw.ranks, _lengths(partition, np.array(positions, np.int64)))
        except FAULTS as error:  # boundary: tags and subclasses are a user's
            raise SamplerError(f"{self.name} could not deal {len(positions)} rows: {_text(error)}") from error
        if len(shares) != draw.ranks or sorted(row for share in shares for row in share) != positions:
            raise SamplerError(f"{self.name} must deal each row to one of {draw.ranks} ranks")
        return shares

    def _repeat(
        self, partition: Partition, subscription: Subscription, command: Fetch, draw: Draw, ordinals: Rows
    ) -> Batch | Outcome:
        """A batch that was dealt before."""
        positions = as_positions(ordinals) - partition.base
        if not len(positions) or int(positions.min()) < 0 or not bool(partition.alive.array[positions].all()):
            raise StorageKeyNotFoundError(
                f"batch {draw.batch!r} of rank {draw.rank} of task {command.task!r} was drawn before, and some of its "
                f"rows have been cleared from partition {partition.name!r} since; ask for the next batch_index"
            )
        rows = compact(positions)
        if not subscription.selection.complete(rows):
            lost = partition.lost_rows(rows, subscription.selection.column_groups)
            if len(lost):
                raise DataLostError(
                    f"{len(lost)} rows of batch {draw.batch!r} of rank {draw.rank} were lost with their storage unit; "
                    "write them again or ask for the next batch_index"
                )
            return _LACKS_FIELDS
        open_rows = positions[subscription.task.taken[positions] != CONSUMED]
        if draw.seed is None and len(open_rows):
            self._hand_out(partition, subscription, command, compact(open_rows), True)
        return make_batch(partition, rows, subscription.selection, locate=command.locate)

    # ---------------------------------------------------------------------------------------------- user's samplers

    def _ask(self, partition: Partition, subscription: Subscription, command: Fetch) -> Batch | Outcome:
        try:
            params = {"partition_id": partition.name, "task_name": command.task, **unpack_arrays(command.params)}
            cached = self.sampler.has_cached_result(params["partition_id"], params["task_name"], dict(params))
            if not cached and subscription.ready.available < command.batch_size:
                return _TOO_FEW
            ready = partition.indexes.indexes(compact(subscription.ready.members()), partition.base).tolist()
            view = PartitionView(partition, partition.is_rest_ready(subscription))
            answer = self.sampler(ready, command.batch_size, **{**params, "partition": view})
            sampled, consumed = self._check(answer)
        except SamplerError:
            raise
        except FAULTS as error:  # boundary to a user's code
            raise SamplerError(f"{self.name} raised {type(error).__name__}: {_text(error)}") from error
        if len(sampled) > command.batch_size > 0:
            raise SamplerError(f"{self.name} returned {len(sampled)} rows for a batch of {command.batch_size}")
        rows, taken = partition.find(sampled), partition.find(consumed)
        members = np.isin(rows, subscription.ready.members())
        if bool((rows < 0).any()) or not (cached or bool(members.all())):
            raise SamplerError(f"{self.name} returned rows that are not in the ready list")
        if not bool((np.isin(taken, subscription.ready.members()) | np.isin(taken, rows)).all()):
            raise SamplerError(f"{self.name} consumed rows that are not in the ready list")
        if len(rows) and not subscription.selection.complete(rows):
            raise SamplerError(f"{self.name} returned rows that lack one of the fields {list(command.fields)}")
        given = np.isin(taken, rows) & (subscription.task.taken[taken] != CONSUMED)
        if len(dropped := taken[~given]):
            partition.take(subscription.task, compact(dropped))
        if given.any():
            subscription.ready.discard(compact(taken[given]))
            self._hand_out(partition, subscription, command, compact(taken[given]))
        if not len(rows):
            return EMPTY_BATCH if self._is_dealt_nothing(params) else _TOO_FEW
        return make_batch(partition, compact(rows), subscription.selection, locate=command.locate)

    def _is_dealt_nothing(self, params: dict[str, Any]) -> bool:
        """The sampler gave no rows: for good, as the batch that was asked for is an empty one?"""
        try:
            return bool(self.sampler.has_cached_result(params["partition_id"], params["task_name"], dict(params)))
        except FAULTS as error:  # boundary to a user's code
            raise SamplerError(f"{self.name} raised {type(error).__name__}: {_text(error)}") from error

    def _check(self, answer: object) -> tuple[Ints, Ints]:
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise SamplerError(f"{self.name} must return (sampled, consumed); got {type(answer).__name__}")
        found = []
        for name, rows in zip(("sampled", "consumed"), answer, strict=True):
            if not isinstance(rows, list | tuple | np.ndarray) or not all(
                isinstance(row, int | np.integer) and not isinstance(row, bool) for row in rows
            ):
                raise SamplerError(f"{self.name} must return {name} as a list of int; got {rows!r:.200}")
            if len(set(rows)) != len(rows):
                raise SamplerError(f"{self.name} returned {name} with repeated rows")
            if any(not 0 <= row < 1 << 63 for row in rows):
                raise SamplerError(f"{self.name} returned {name} with numbers that are no indexes: {rows!r:.200}")
            found.append(np.array(rows, np.int64))
        return found[0], found[1]


def _lengths(partition: Partition, positions: Ints) -> list[float]:
    """The tag ``total_lengths`` of each row, 1 where absent. Raises what a tag that is no number raises."""
    if not partition.tags:
        return [1.0] * len(positions)
    return [float(tag.get("total_lengths", 1)) for tag in partition.tags_at(positions)]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except FAULTS:  # boundary: a user's exception may fail even at this
        return "(its text cannot be shown)"
