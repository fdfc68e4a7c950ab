"""Fetches: answered at once, or parked and answered by the event that makes them satisfiable."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transfer_queue.control.batches import EMPTY_BATCH
from transfer_queue.control.commands import Batch, Fetch
from transfer_queue.control.effects import PARKED, EffectLog, Parked
from transfer_queue.control.partition import Partition
from transfer_queue.control.puts import did_you_mean, join_names, name_some
from transfer_queue.control.sampler_adapter import Outcome, SamplerAdapter
from transfer_queue.control.subscription import Subscription
from transfer_queue.control.wait_queue import LineKey, Waiter, WaitQueue
from transfer_queue.errors import InvalidInputError, RequestError, TransferQueueError, WaitTimeoutError

__all__ = ["Serving"]


class Serving:
    """Waiters of one subscription are served in the order they came: with a built-in sampler the first one that lacks
    rows holds up those behind it, unless their batch is dealt already. What a user's sampler will do is not known
    beforehand, so with one each waiter is tried on its own. Other subscriptions never notice."""

    def __init__(self, wait_queue: WaitQueue, log: EffectLog, adapter: SamplerAdapter, polling: bool) -> None:
        self.adapter = adapter
        self.polling = polling
        self.wait_queue = wait_queue
        self._log = log

    def fetch(
        self, command: Fetch, partition: Partition | None, now: float, client: int, request: int
    ) -> Batch | Parked:
        if not command.task:
            raise RequestError("a fetch needs a task_name: rows are consumed once by each task")
        if command.batch_size < 1 and "token_budget" not in command.params:
            raise InvalidInputError(f"batch_size must be positive; got {command.batch_size}")
        if not command.fields:
            raise InvalidInputError("a fetch must name at least one field")
        draw = self.adapter.plan(command)
        subscription = None
        lacks_fields = False
        if partition is not None:
            subscription = partition.subscribe(command.task, tuple(command.fields))
            may_take = not subscription.waiting or self._nobody_needs_rows(subscription)
            deals = subscription.task.deals
            outcome = self.adapter.draw(partition, subscription, command, draw, may_take)
            if not isinstance(outcome, Outcome):
                if subscription.task.deals != deals:
                    self.serve(partition, subscription.task.subscriptions)
                return outcome
            lacks_fields = outcome.waits_for_fields
        if self.polling or not command.timeout_s > 0:
            return EMPTY_BATCH
        if self.wait_queue.find(client, request) is not None:
            raise RequestError(f"request {request} of client {client} is waiting already")
        key = (command.partition, command.task, tuple(sorted(set(command.fields))))
        waiter = Waiter(command, client, request, now, now + command.timeout_s, draw, key)
        line = self.wait_queue.add(waiter)
        if subscription is not None:
            subscription.waiting = line
            waiter.waits_for_fields = lacks_fields
            subscription.lacking |= lacks_fields
        return PARKED

    def adopt(self, partition: Partition) -> None:
        """The partition came into being: connect those who wait for it."""
        for (_, task, names), line in self.wait_queue.lines(partition.name).items():
            partition.subscribe(task, names).waiting = line
            for waiter in line.values():
                waiter.waits_for_fields = False  # of rows that went with the former partition of the name

    def serve(self, partition: Partition, grown: Iterable[Subscription]) -> None:
        """Answer the waiters that can be answered now that these subscriptions may have more rows."""
        waiting = [subscription for subscription in grown if subscription.waiting]
        if len(waiting) == 1:
            self._serve_task(partition, waiting)
        elif waiting:
            for task in dict.fromkeys(subscription.task for subscription in waiting):
                self._serve_task(partition, [s for s in waiting if s.task is task])

    def serve_lacking(self, partition: Partition) -> None:
        """Rows went away: tell those who wait for fields of rows that they were dealt."""
        self.serve(partition, [s for s in partition.subscriptions.values() if s.lacking])

    def _serve_task(self, partition: Partition, waiting: list[Subscription]) -> None:
        """Serve lines of one task; they compete for rows, so that among them too the first to come is first."""
        task = waiting[0].task
        while waiting:
            deals = task.deals
            if len(waiting) == 1:
                self._serve_heads(partition, waiting[0])
            self._serve_all(partition, [s for s in waiting if self._may_serve(s)])
            if task.deals == deals:
                return
            waiting = [s for s in task.subscriptions if s.waiting]  # what was dealt may be what others wait for

    def _serve_heads(self, partition: Partition, subscription: Subscription) -> None:
        """The common case: nobody in the line has a claim to certain rows, so that only the first one matters."""
        line = subscription.waiting
        while self.adapter.planned is not None and line and not _has_batch(first := next(iter(line.values()))):
            if not self._try(partition, subscription, first, True):
                return

    def _may_serve(self, subscription: Subscription) -> bool:
        """Return whether anything changed for someone in the line."""
        if not subscription.waiting:
            return False
        if self.adapter.planned is None or subscription.lacking or subscription.deals_seen != subscription.task.deals:
            return True
        first = next(iter(subscription.waiting.values())).draw
        return first is None or first.needs <= subscription.ready.available

    def _serve_all(self, partition: Partition, subscriptions: list[Subscription]) -> None:
        waiters: list[tuple[int, Waiter, Subscription]] = []
        for subscription in subscriptions:
            subscription.deals_seen, subscription.lacking = subscription.task.deals, False
            waiters += [(w.number, w, subscription) for w in (subscription.waiting or {}).values()]
        blocked: set[int] = set()
        for _, waiter, subscription in sorted(waiters):
            if not self._try(partition, subscription, waiter, id(subscription) not in blocked):
                subscription.lacking |= waiter.waits_for_fields
                if self.adapter.planned is not None and not waiter.waits_for_fields:
                    blocked.add(id(subscription))

    def _try(self, partition: Partition, subscription: Subscription, waiter: Waiter, may_take: bool) -> bool:
        """Returns whether the waiter got its answer."""
        command = waiter.command
        assert isinstance(command, Fetch)
        self._log.origin = (waiter.client, waiter.request)
        try:
            outcome = self.adapter.draw(partition, subscription, command, waiter.draw, may_take)
        except TransferQueueError as error:
            self.wait_queue.remove(waiter)
            self._log.answer(waiter.client, waiter.request, error)
            return True
        if isinstance(outcome, Outcome):
            waiter.waits_for_fields = outcome.waits_for_fields
            return False
        self.wait_queue.remove(waiter)
        self._log.answer(waiter.client, waiter.request, outcome)
        return True

    def _nobody_needs_rows(self, subscription: Subscription) -> bool:
        if self.adapter.planned is None:
            return True
        line = subscription.waiting
        return not line or all(waiter.waits_for_fields for waiter in line.values())

    # --------------------------------------------------------------------------------------------------- timeouts

    def timeout_error(
        self, waiter: Waiter, partition: Partition | None, known: dict[LineKey | None, str]
    ) -> WaitTimeoutError:
        """``known``: what was found out for other waiters of the same moment, by subscription; looking costs time in
        proportion to the partition."""
        command = waiter.command
        assert isinstance(command, Fetch)
        if waiter.key not in known:
            known[waiter.key] = "0 are ready: the partition does not exist"
            if partition is not None:
                known[waiter.key] = self.shortfall(command, partition)
        shortfall = known[waiter.key]
        line = self.wait_queue.lines(command.partition)[waiter.key] if waiter.key else {}
        ahead = next(iter(line.values()), waiter)
        if ahead is not waiter and isinstance(ahead.command, Fetch) and self.adapter.planned is not None:
            shortfall += f"; an earlier request for {ahead.command.batch_size} rows waits in front"
        waited = f"{waiter.deadline - waiter.since:g} s" if waiter.deadline < math.inf else "a while"
        return WaitTimeoutError(
            f"Timeout: task {command.task!r} waited {waited} for {command.batch_size} rows of partition "
            f"{command.partition!r} with fields {list(command.fields)}; {shortfall}"
        )

    def missing(self, command: Fetch, partition: Partition) -> dict[str, int]:
        """For each field of a fetch the number of rows that lack it."""
        rows, column_groups = partition.all_rows(), partition.fields.column_group_of
        return {
            name: int((column_groups[name].slot.array[rows] <= 0).sum()) if name in column_groups else partition.rows
            for name in command.fields
        }

    def shortfall(self, command: Fetch, partition: Partition) -> str:
        """Why a fetch cannot be answered yet, in words."""
        subscription = partition.subscribe(command.task, tuple(command.fields))
        rows = partition.all_rows()
        causes = [f"{subscription.ready.available} are ready"]
        if self.adapter.queueing.group > 1:
            causes[0] += f" in complete groups of {self.adapter.queueing.group}"
        if note := self.adapter.shortfall(partition, subscription, command):
            causes.append(note)
        leased = sum(lease.left for lease in subscription.task.leases.values())
        if leased:
            causes.append(f"{leased} were fetched and are not acknowledged")
        taken = int((subscription.task.taken[rows] != 0).sum()) - leased
        if taken:
            causes.append(f"{taken} of {partition.rows} were consumed before")
        known, unwritten = partition.fields.column_group_of, []
        lacking: dict[int, list[str]] = {}
        for name, missing in self.missing(command, partition).items():
            if missing and name not in known:
                unwritten.append(name)
            elif missing:
                lacking.setdefault(missing, []).append(name)
            elif not partition.rows:
                lacking.setdefault(0, []).append(name)
        for missing, names in lacking.items():
            where = f" on {missing} of {partition.rows}" if missing else ": there are no rows"
            causes.append(f"{join_names(names)} {'is' if len(names) == 1 else 'are'} missing{where}")
        if unwritten:
            what = f"field {unwritten[0]!r}" if len(unwritten) == 1 else f"the fields {name_some(unwritten)}"
            causes.append(f"no row of partition {partition.name!r} has {what}{did_you_mean(unwritten, known)}")
        lost = len(partition.lost_rows(rows, subscription.selection.column_groups))
        if lost:
            causes.append(f"{lost} are lost with their storage unit")
        return ", ".join(causes)


def _has_batch(waiter: Waiter) -> bool:
    return waiter.draw is not None and waiter.draw.batch is not None
