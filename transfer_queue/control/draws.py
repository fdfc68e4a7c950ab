"""Where samplers meet the state: turns a fetch into rows taken and a batch to answer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.control.arrays import Ints, Rows, as_positions, compact
from transfer_queue.control.batches import make_batch
from transfer_queue.control.commands import Batch, Fetch
from transfer_queue.control.partition import Partition
from transfer_queue.control.subscription import CONSUMED, PROMISED, Subscription
from transfer_queue.errors import DataLostError, SamplerError, StorageKeyNotFoundError
from transfer_queue.sampler import BaseSampler, Draw, PlannedSampler

__all__ = ["Drawer", "Outcome", "PartitionView"]


class PartitionView:
    """What a user's sampler sees as ``partition``."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.partition_id = partition.name

    def get_custom_meta(self, global_indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Index -> a copy of its tag; rows that do not exist are left out."""
        indexes = np.array(global_indexes, np.int64)
        positions = self._partition.find(indexes)
        known = positions >= 0
        tags = self._partition.tags_at(positions[known]) or [{} for _ in range(int(known.sum()))]
        return dict(zip(indexes[known].tolist(), tags, strict=True))


class Outcome:
    """Why a fetch got nothing: its rows are chosen but lack fields, or there are too few rows."""

    __slots__ = ("waits_for_fields",)

    def __init__(self, waits_for_fields: bool) -> None:
        self.waits_for_fields = waits_for_fields


_TOO_FEW = Outcome(False)
_LACKS_FIELDS = Outcome(True)


class Drawer:
    """Draws with one sampler. Built-in samplers say what they take (`PlannedSampler.plan`) and the subscription's ready
    queue gives it; what ranks have been dealt is kept with the task. A user's sampler is shown the list of ready rows.
    """

    def __init__(self, sampler: BaseSampler) -> None:
        self.sampler = sampler
        self.name = type(sampler).__name__
        overridden = type(sampler).sample is not PlannedSampler.sample
        self.planned = sampler if isinstance(sampler, PlannedSampler) and not overridden else None
        self.group = self.planned.group if self.planned else 1

    def plan(self, command: Fetch) -> Draw | None:
        """What the fetch will take; None if a user's sampler decides."""
        if self.planned is None:
            return None
        try:
            draw = self.planned.plan(command.batch_size, command.params)
        except Exception as error:  # boundary: subclasses are a user's code
            raise SamplerError(f"{self.name}: {error}") from error
        if draw.rows < 1 or draw.rows % self.group:
            raise SamplerError(f"{self.name} plans to take {draw.rows} rows; it takes groups of {self.group}")
        return draw

    def forget(self, partition: str) -> None:
        """The partition is about to be cleared, or consumption reset."""
        try:
            self.sampler.clear_cache(partition)
        except Exception as error:  # boundary to a user's code
            raise SamplerError(f"{self.name}.clear_cache raised {type(error).__name__}: {error}") from error

    def draw(
        self, partition: Partition, subscription: Subscription, command: Fetch, draw: Draw | None, may_take: bool
    ) -> Batch | Outcome:
        """The batch, or why there is none. ``may_take``: nobody is ahead, so that rows may be taken."""
        if draw is None:
            return self._ask(partition, subscription, command)
        if draw.batch is not None:
            known = subscription.task.batches.get((draw.rank, draw.batch))
            if known is not None:
                return self._repeat(partition, subscription, command, draw, known)
        if not may_take or subscription.ready.available < draw.rows:
            return _TOO_FEW
        rows = subscription.ready.take(draw.rows)
        if draw.batch is not None:
            rows = self._deal(partition, subscription, draw, rows)
        partition.consume(subscription.task, rows, CONSUMED, subscription)
        return make_batch(partition, rows, subscription.selection, locate=command.locate)

    def _deal(self, partition: Partition, subscription: Subscription, draw: Draw, rows: Rows) -> Rows:
        """Divide drawn rows among ranks; returns the share of the asking one."""
        task = subscription.task
        assert draw.batch is not None
        if draw.ranks == 1:
            partition.assign(task, draw.rank, draw.batch, rows)
            return rows
        try:
            shares = self._shares(partition, draw, as_positions(rows).tolist())
        except SamplerError:
            subscription.ready.add(rows)
            raise
        own: Rows = slice(0, 0)
        for rank, share in enumerate(shares):
            dealt = compact(np.array(share, np.int64))
            partition.assign(task, rank, draw.batch, dealt)
            if rank == draw.rank:
                own = dealt
            else:
                partition.consume(task, dealt, PROMISED, subscription)
        return own

    def _shares(self, partition: Partition, draw: Draw, positions: list[int]) -> list[list[int]]:
        assert self.planned is not None
        tags = partition.tags_at(np.array(positions, np.int64))
        try:
            lengths = [float(tag.get("total_lengths", 1)) for tag in tags] if tags else [1.0] * len(positions)
            shares = self.planned.share(positions, draw.ranks, lengths)
        except Exception as error:  # boundary: tags and subclasses are a user's
            raise SamplerError(f"{self.name} could not deal {len(positions)} rows: {error}") from error
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
            lost = partition.lost_rows(rows, subscription.selection.families)
            if len(lost):
                raise DataLostError(
                    f"{len(lost)} rows of batch {draw.batch!r} of rank {draw.rank} were lost with their storage unit; "
                    "write them again or ask for the next batch_index"
                )
            return _LACKS_FIELDS
        if bool((subscription.task.taken.array[rows] != CONSUMED).any()):
            partition.consume(subscription.task, rows, CONSUMED, subscription)
        return make_batch(partition, rows, subscription.selection, locate=command.locate)

    # ---------------------------------------------------------------------------------------------- user's samplers

    def _ask(self, partition: Partition, subscription: Subscription, command: Fetch) -> Batch | Outcome:
        params = {"partition_id": partition.name, "task_name": command.task, **command.params}
        try:
            cached = self.sampler.has_cached_result(params["partition_id"], params["task_name"], dict(params))
            if not cached and subscription.ready.available < command.batch_size:
                return _TOO_FEW
            ready = partition.indexes.indexes(compact(subscription.ready.members()), partition.base).tolist()
            answer = self.sampler(ready, command.batch_size, **{**params, "partition": PartitionView(partition)})
        except Exception as error:  # boundary to a user's code
            raise SamplerError(f"{self.name} raised {type(error).__name__}: {error}") from error
        sampled, consumed = self._check(answer)
        rows, taken = partition.find(sampled), partition.find(consumed)
        members = np.isin(rows, subscription.ready.members())
        if bool((rows < 0).any()) or not (cached or bool(members.all())):
            raise SamplerError(f"{self.name} returned rows that are not in the ready list")
        if not bool((np.isin(taken, subscription.ready.members()) | np.isin(taken, rows)).all()):
            raise SamplerError(f"{self.name} consumed rows that are not in the ready list")
        if len(rows) and not subscription.selection.complete(rows):
            raise SamplerError(f"{self.name} returned rows that lack one of the fields {list(command.fields)}")
        if len(taken):
            partition.consume(subscription.task, compact(taken), CONSUMED)
        if not len(rows):
            return _TOO_FEW
        return make_batch(partition, compact(rows), subscription.selection, locate=command.locate)

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
