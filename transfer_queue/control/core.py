"""The control plane as a state machine: commands in, replies and effects out. No sockets, no clock, no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.control import queries, snapshot
from transfer_queue.control.arrays import Ints, compact
from transfer_queue.control.commands import (
    Acknowledge,
    Batch,
    Clear,
    Command,
    Commit,
    Committed,
    ConsumptionStatus,
    Done,
    Fetch,
    KeysOf,
    ListKeys,
    ListPartitions,
    Lock,
    Lookup,
    ProductionStatus,
    RenewLock,
    Reply,
    ResetConsumption,
    SetTags,
    Snapshot,
    StatusArrays,
    Value,
)
from transfer_queue.control.description import describe, describe_waiters, validate, validate_waiters
from transfer_queue.control.directory import block_ids, units_of
from transfer_queue.control.effects import PARKED, Effect, Parked
from transfer_queue.control.lease import Lease
from transfer_queue.control.partition import Partition
from transfer_queue.control.puts import Put, check_cells, check_put
from transfer_queue.control.records import BlocksMoved, Record, UnitJoined, UnitLost
from transfer_queue.control.replay import replay
from transfer_queue.control.requests import HandlerTable
from transfer_queue.control.row_states import CONSUMED
from transfer_queue.control.sampler_adapter import SamplerAdapter
from transfer_queue.control.serving import Serving
from transfer_queue.control.state import ControlState
from transfer_queue.control.subscription import Task
from transfer_queue.control.wait_queue import LineKey, Waiter, WaitQueue
from transfer_queue.errors import (
    CapacityError,
    DataLostError,
    InvalidInputError,
    InvalidTypeError,
    RequestError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnknownPartitionError,
)
from transfer_queue.sampler import BaseSampler, SequentialSampler

__all__ = ["ControlCore"]


class ControlCore:
    """State of one controller.

    The host calls `apply` for each request and `tick` when `next_deadline` has come, with its own clock (seconds,
    monotonic), and acts on what `drain_effects` returns. Commands that cannot be carried out raise and change nothing.
    Replies and commands share no mutable state with the core except tags, lists of field names and schemas, which are
    read-only.

    ``sampler``: default SequentialSampler. ``polling``: fetches never wait. ``shard``: this controller's number, part
    of every index. ``sample_capacity``: most rows that may exist at a time. ``journal``: emit Journal effects.
    ``lease_s``: of fetches that say nothing of it; 0: what they take is consumed at once.
    """

    _handlers = HandlerTable()

    def __init__(
        self,
        *,
        sampler: BaseSampler | None = None,
        polling: bool = False,
        shard: int = 0,
        sample_capacity: int | None = None,
        journal: bool = False,
        lease_s: float = 0.0,
    ) -> None:
        if sample_capacity is not None and sample_capacity < 1:
            raise InvalidInputError(f"sample_capacity must be positive; got {sample_capacity}")
        self.sample_capacity = sample_capacity
        self.state = ControlState(shard=shard, journaling=journal, lease_s=lease_s)
        self.wait_queue = WaitQueue()
        adapter = SamplerAdapter(sampler or SequentialSampler(), self.state.leases)
        self.state.queueing = adapter.queueing
        self.serving = Serving(self.wait_queue, self.state.log, adapter, polling)

    # ------------------------------------------------------------------------------------------------- host's calls

    def apply(self, command: Command, now: float, *, client: int = 0, request: int = 0) -> Reply | Parked:
        """Carry out a command. ``client`` and ``request`` name it if it has to be parked. Raises TransferQueueError."""
        handler = self._handlers.get(type(command))
        if handler is None:
            raise InvalidTypeError(f"not a command: {type(command).__name__}")
        state = self.state
        state.log.origin = (client, request)
        state.leases.now = now
        reply: Reply | Parked = handler(self, command)
        return reply

    def cancel(self, client: int, request: int | None = None, now: float | None = None) -> None:
        """Nobody waits for the answer any more: forget one parked request of a client, or all of them."""
        self.state.leases.now = self.state.leases.now if now is None else now
        if request is None:
            waiters = self.wait_queue.of_client(client)
            self.state.locks.withdraw(client, None, self.state.leases.now)
        else:
            found = self.wait_queue.find(client, request)
            waiters = [] if found is None else [found]
            self.state.locks.withdraw(client, request, self.state.leases.now)
        self._leave(waiters)

    def disconnected(self, client: int, now: float) -> None:
        """The client's connection ended. It may come back, but its locks are over, and no request of it waits."""
        self.cancel(client, None, now)
        self.state.locks.disconnected(client, now)

    def client_returned(self, former: int, client: int) -> None:
        """The client that had the number ``former`` has the number ``client``: it may complete its groups."""
        for partition in self.state.partitions.values():
            partition.renumber_client(former, client)

    def client_gone(self, client: int, now: float) -> None:
        """The client will not be heard of again: what it has not acknowledged goes back."""
        self.disconnected(client, now)
        for partition in list(self.state.partitions.values()):
            for task in list(partition.tasks.values()):
                for lease in [lease for lease in task.leases.values() if lease.client == client]:
                    self._end_lease(partition, task, lease)

    def restart_leases(self, now: float) -> None:
        """After `restore` and `replay`: leases last, and tasks are idle, as if they began now."""
        self.state.leases.now = now
        self.state.leases.restart()
        for partition in self.state.partitions.values():
            for task in partition.tasks.values():
                task.last_fetch = now
        self.state.locks.restart(now)

    def tick(self, now: float) -> None:
        """Take back rows whose lease is over, and answer parked requests whose deadline has come with an error."""
        self.state.leases.now = now
        for partition, task, lease in self.state.leases.expired():
            self._end_lease(partition, task, lease)
        self.state.locks.tick(now)
        known: dict[LineKey | None, str] = {}
        for waiter in self.wait_queue.expired(now):
            error: TransferQueueError
            if isinstance(waiter.command, Commit):
                error = self._capacity_error(waiter.command, waiter.deadline - waiter.since)
            else:
                error = self.serving.timeout_error(waiter, self.state.partitions.get(waiter.command.partition), known)
            self.state.log.answer(waiter.client, waiter.request, error)
            self._leave([waiter])

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        parts = (self.wait_queue, self.state.leases, self.state.locks)
        found = [at for at in (part.next_deadline() for part in parts) if at is not None]
        return min(found, default=None)

    def drain_effects(self) -> list[Effect]:
        """Effects since the last call: journal records first, then freed blocks, then answers."""
        return self.state.log.drain()

    @property
    def sampler(self) -> BaseSampler:
        return self.serving.adapter.sampler

    def set_sampler(self, sampler: BaseSampler) -> None:
        """Replace the sampler. Parked fetches are planned again, and those that the new sampler does not accept are
        answered with an error."""
        adapter = self.serving.adapter = SamplerAdapter(sampler, self.state.leases)
        self.state.queueing = adapter.queueing
        for partition in self.state.partitions.values():
            partition.requeue(adapter.queueing)
        for waiter in list(self.wait_queue):
            if isinstance(waiter.command, Fetch):
                try:
                    waiter.draw = adapter.plan(waiter.command)
                except TransferQueueError as error:
                    self.state.log.answer(waiter.client, waiter.request, error)
                    self.wait_queue.remove(waiter)
        for partition in self.state.partitions.values():
            self.serving.serve(partition, partition.subscriptions.values())

    # -------------------------------------------------------------------------------------------------- durability

    def snapshot(self) -> dict[str, Any]:
        """All state except parked requests, as plain data that msgpack can carry. A user's sampler keeps its own."""
        return snapshot.dump(self.state)

    def restore(self, data: dict[str, Any]) -> None:
        """Into a new core: the state that `snapshot` returned. Storage units must join with their inventories, or be
        reported lost, before what their blocks hold can be relied on."""
        snapshot.load(self.state, data)
        self.state.blocks.suspect_all()

    def replay(self, records: Iterable[Record]) -> None:
        """Into a new or a restored core: what happened since. Emits nothing; blocks that had to be freed meanwhile show
        up in `unknown_blocks` when their unit joins."""
        with self.state.log.silenced():
            replay(self.state, records)
        self.state.log.drain()
        self.state.blocks.suspect_all()

    def describe(self, *, waiters: bool = True) -> str:
        """The whole state as text, a line a row."""
        lines = describe(self.state)
        if waiters:
            lines += [*self.state.locks.describe_waiters(), *describe_waiters(self.wait_queue)]
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """Equal for cores with equal state; parked requests do not count."""
        return hashlib.sha256(self.describe(waiters=False).encode()).hexdigest()

    def validate_state(self) -> None:
        """AssertionError if the state contradicts itself; for tests."""
        validate(self.state)
        validate_waiters(self.serving, self.state)
        assert self.sample_capacity is None or self.state.rows <= self.sample_capacity
        assert len(self.wait_queue) == len(list(self.wait_queue))

    # ------------------------------------------------------------------------------------------------ storage units

    def unit_lost(self, unit: int, now: float) -> None:
        """The unit's memory is gone, or it cannot be reached: rows with cells there are not ready until it joins with
        their blocks or they are written again. Commits that name the unit are refused until it joins."""
        self.state.leases.now = now
        self.state.units.lose(unit)
        if self.state.log.journaling:
            self.state.log.origin = (0, 0)
            self.state.log.record(UnitLost(unit))
        for partition in self.state.partitions.values():
            self.serving.serve_lacking(partition)
        self.admit_commits()  # refuses the first parked commit if its blocks are gone

    def unit_suspect(self, unit: int) -> None:
        """The unit cannot be reached for now: what it holds counts, but it is asked when it joins."""
        self.state.units.suspect(unit)

    def unit_joined(self, unit: int, inventory: Iterable[int] | None = None, now: float | None = None) -> None:
        """The unit serves. ``inventory``: ids of the blocks it holds, None for a new unit, which holds none.

        Blocks that the core knew when the unit was suspected or lost, or when the core itself was restored, are
        confirmed or lost; younger ones are not touched, as their commit may have overtaken the inventory. A unit whose
        memory is new must be reported lost first.
        """
        self.state.leases.now = self.state.leases.now if now is None else now
        restored, lost = self.state.units.sort_out(unit, inventory or ())
        self._join(unit, restored, lost)

    def unit_holds(self, unit: int, blocks: Iterable[int], now: float) -> None:
        """A unit that joined tells what it has stored since it listed its inventory. Rows of such blocks were lost if
        the unit was suspected between their commit and the inventory's arrival; they are there again."""
        self.state.leases.now = now
        restored, _ = self.state.units.sort_out(unit, blocks)
        if restored:
            self._join(unit, restored, [])

    def _join(self, unit: int, restored: list[int], lost: list[int]) -> None:
        self.state.log.origin = (0, 0)
        if self.state.log.journaling:
            self.state.log.record(UnitJoined(unit, restored, lost))
        for partition, grown in self.state.units.join(unit, restored, lost):
            self.serving.serve(partition, grown)
        if lost:
            for partition in self.state.partitions.values():
                self.serving.serve_lacking(partition)

    def move_blocks(self, unit: int, moves: list[tuple[int, int, int]]) -> list[int]:
        """Rows of blocks of ``unit`` lie in copies from now on: (block, unit of its copy, block of its copy).

        Returns the blocks that had rows, which are freed. Raises DataLostError, and then nothing changed.
        """
        lost = sorted({unit, *(move[1] for move in moves)} & self.state.units.lost)
        if lost:
            raise DataLostError(f"storage unit {lost[0]} was lost while its blocks were moved or got blocks")
        blocks, units, copies = [list(column) for column in zip(*moves, strict=True)] if moves else ([], [], [])
        moved = self.state.units.move(unit, blocks, units, copies)
        self.state.log.origin = (0, 0)
        if moved and self.state.log.journaling:
            self.state.log.record(BlocksMoved(unit, blocks, units, copies))
        self.state.log.free(unit, moved)
        return moved

    def partitions_at(self, slots: Ints) -> list[str]:
        """Names of the partitions whose rows lie in the blocks of these slots, one each."""
        numbers = np.zeros(self.state.blocks.mask(slots).shape, np.int64)
        for number, partition in enumerate(self.state.partitions.values()):
            for column_group in partition.fields.column_groups:
                numbers[np.abs(column_group.slot.array[: partition.table.used])] = number
        names = list(self.state.partitions)
        return [names[number] for number in numbers[slots].tolist()]

    def unknown_blocks(self, unit: int, blocks: list[int]) -> list[int]:
        """Return the blocks among ``blocks`` that neither a row refers to nor a partition on its way here. A put that
        is not committed yet is among them: ask again after a grace period before freeing what a unit reports."""
        known = set(self.state.blocks.block.array[self.state.blocks.find(unit, blocks)].tolist())
        for arrival in self.state.moves.arriving.values():
            known.update(block_ids(arrival.content)[units_of(arrival.content) == unit].tolist())
        return [block for block in blocks if block not in known]

    # ------------------------------------------------------------------------------------------------------- commit

    @_handlers.on(Commit)
    def _commit(self, command: Commit) -> Reply | Parked:
        state, (client, request) = self.state, self.state.log.origin
        partition = state.partitions.get(command.partition)
        put = check_put(partition, command)
        self._check_conditions(command, put, partition, client)
        if put.created and self.sample_capacity is not None and not self._fits(put, self.sample_capacity):
            if not command.wait_s > 0 or put.created > self.sample_capacity:
                raise self._capacity_error(command, 0)
            now = state.leases.now
            if self.wait_queue.find(client, request) is not None:
                raise RequestError(f"request {request} of client {client} is waiting already")
            self.wait_queue.add(Waiter(command, client, request, now, now + command.wait_s))
            return PARKED
        return self._carry_out(command, put, partition)

    def _check_conditions(self, command: Commit, put: Put, partition: Partition | None, client: int) -> None:
        """What has to hold at the moment at which the commit takes effect."""
        if self.state.units.lost:
            self._check_units(command)
        if command.lock:
            self.state.locks.check(command.partition, command.lock, client)
        if command.expects is not None:
            check_cells(partition, put, command.expects, self.state.blocks)

    def _check_units(self, command: Commit) -> None:
        lost = sorted({ref.unit for ref in command.blocks} & self.state.units.lost)
        if lost:
            raise DataLostError(f"storage unit {lost[0]} was lost before the put was committed; put the rows again")

    def _fits(self, put: Put, capacity: int) -> bool:
        return self.state.rows + put.created <= capacity and not self.wait_queue.commits

    def _capacity_error(self, command: Commit, waited: float) -> CapacityError:
        count = check_put(self.state.partitions.get(command.partition), command).created
        ahead = len(self.wait_queue.commits) - (waited > 0)
        return CapacityError(
            f"sample capacity is used up: {self.state.rows} of {self.sample_capacity} rows exist, {count} more "
            + (f"did not fit within {waited:g} s" if waited else "do not fit")
            + (f", {ahead} commits wait in front" if ahead > 0 else "")
            + "; clear rows, raise controller.sampleCapacity or wait longer"
        )

    def _carry_out(self, command: Commit, put: Put, partition: Partition | None) -> Committed:
        if partition is None:
            partition = self.state.create_partition(command.partition)
            self.serving.adopt(partition)
        created = partition.create(put.created, put.new_keys) if put.created else slice(0, 0)
        grouped = put.created > 0 and partition.queueing.group > 1
        split = grouped and partition.note_groups(created, self.state.log.origin[0], put.known)
        self.state.rows += put.created
        rows = put.place(created)
        fresh = put.created == put.rows
        if command.tags is not None:
            partition.merge_tags(rows, command.tags)
        grown = []
        if command.fields:
            grown = partition.write(rows, command.fields, command.blocks, command.lengths, fresh)
        if fresh:
            ready = partition.layout(command.fields).schema.sorted_names if command.fields else []
        else:
            ready = partition.fields.complete_names(rows)
        tags = partition.tags_at(rows) if command.tags is not None or not fresh else []
        late = put.created > 0 and partition.ended
        reply = Committed(partition.encode(rows), ready, tags or None, split, late)
        if command.last and not partition.ended:
            partition.end()
        if command.last or (command.tags is not None and not fresh and self.serving.adapter.reads_tags):
            grown = list(partition.subscriptions.values())
        for subscription in grown:
            if subscription.waiting:
                self.serving.serve(partition, grown)
                break
        return reply

    def serve_all(self) -> None:
        """Answer every parked request that can be answered, after the state was replaced."""
        for partition in self.state.partitions.values():
            self.serving.adopt(partition)
            self.serving.serve(partition, partition.subscriptions.values())
        self.admit_commits()

    def admit_commits(self) -> None:
        """Carry out parked commits in order, as far as the sample budget allows."""
        while self.wait_queue.commits:
            waiter = next(iter(self.wait_queue.commits.values()))
            command = waiter.command
            assert isinstance(command, Commit)
            partition = self.state.partitions.get(command.partition)
            result: Reply | TransferQueueError
            self.state.log.origin = (waiter.client, waiter.request)
            try:
                put = check_put(partition, command)
                self._check_conditions(command, put, partition, waiter.client)
                if self.state.rows + put.created > (self.sample_capacity or math.inf):
                    return
                self.wait_queue.remove(waiter)
                result = self._carry_out(command, put, partition)
            except TransferQueueError as error:  # what it relied on changed while it waited
                self.wait_queue.remove(waiter)
                result = error
            self.state.log.answer(waiter.client, waiter.request, result)

    def _leave(self, waiters: list[Waiter]) -> None:
        """Waiters go unserved, all before any of those behind them goes on."""
        for waiter in waiters:
            self.wait_queue.remove(waiter)
        for waiter in waiters:
            if isinstance(waiter.command, Commit):
                self.admit_commits()
            elif partition := self.state.partitions.get(waiter.command.partition):
                subscription = partition.subscribe(waiter.command.task, tuple(waiter.command.fields))
                subscription.task.last_fetch = self.state.leases.now
                self.serving.serve(partition, [subscription])

    # ------------------------------------------------------------------------------------------------ fetch, change

    @_handlers.on(Fetch)
    def _fetch(self, command: Fetch) -> Batch | Parked:
        state = self.state
        client, request = state.log.origin
        partition = state.partitions.get(command.partition)
        return self.serving.fetch(command, partition, state.leases.now, client, request)

    @_handlers.on(Acknowledge)
    def _acknowledge(self, command: Acknowledge) -> Done:
        partition = self.state.partitions.get(command.partition)
        positions = np.zeros(0, np.int64) if partition is None else partition.find_indexes(command.indexes)
        positions = np.unique(positions[positions >= 0])
        if partition is not None and len(positions):
            if command.strict and command.task not in partition.tasks:
                return Done(absent=True)
            task = partition.task(command.task)
            task.last_fetch = self.state.leases.now
            positions = positions[task.taken[positions] != CONSUMED]
            if len(positions):
                partition.take(task, compact(positions))
        return Done()

    def _end_lease(self, partition: Partition, task: Task, lease: Lease) -> None:
        """Rows that are not acknowledged are ready again, each in its place."""
        self.state.log.origin = (0, 0)
        if task.leases.get(lease.number) is lease:
            grown = partition.end_lease(task, lease, partition.returning(task, lease))
            self.serving.serve(partition, grown)

    @_handlers.on(Lock)
    def _lock(self, command: Lock) -> Value | Parked:
        return self.state.locks.lock(command, self.state.leases.now)

    @_handlers.on(RenewLock)
    def _renew_lock(self, command: RenewLock) -> Value:
        return self.state.locks.renew(command, self.state.leases.now)

    @_handlers.on(SetTags)
    def _set_tags(self, command: SetTags) -> Done:
        partition = self.state.partitions.get(command.partition)
        if partition is None:
            raise StorageKeyNotFoundError(f"rows not found: there is no partition {command.partition!r}")
        positions = partition.find_indexes(command.indexes)
        if len(positions) != len(command.tags):
            raise InvalidInputError(f"{len(command.tags)} tags given, which does not match {len(positions)} rows")
        if int(positions.min(initial=0)) < 0:
            raise StorageKeyNotFoundError(
                f"some rows not found in partition {command.partition!r}; they may be cleared"
            )
        partition.merge_tags(compact(positions), command.tags)
        if self.serving.adapter.reads_tags:
            self.serving.serve(partition, partition.subscriptions.values())
        return Done()

    @_handlers.on(Clear)
    def _clear(self, command: Clear) -> Done:
        if command.keys is not None and command.indexes is not None:
            raise InvalidInputError("a clear names rows by keys or by indexes, not both")
        if command.keys is not None and not command.keys:
            raise InvalidInputError("keys is an empty list")
        partition = self.state.partitions.get(command.partition)
        if partition is None:
            return Done(absent=True)
        missing = 0
        if command.keys is None and command.indexes is None:
            self.serving.adapter.forget(partition.name)
            self.state.clear_partition(partition)
        else:
            found = partition.find_keys(command.keys) if command.keys is not None else None
            positions = partition.find_indexes(command.indexes or b"") if found is None else found
            missing = 0 if found is None else int((found < 0).sum())
            positions = np.unique(positions[positions >= 0])
            if len(positions):
                self.state.rows -= len(positions)
                partition.clear(compact(positions))
                self.serving.serve_lacking(partition)
        self.admit_commits()
        return Done(missing=missing)

    @_handlers.on(ResetConsumption)
    def _reset_consumption(self, command: ResetConsumption) -> Done:
        partition = self.state.partitions.get(command.partition)
        if partition is None or (command.task is not None and command.task not in partition.tasks):
            return Done(absent=True)
        if command.idle_s > 0:
            tasks = [task for task in partition.tasks.values() if command.task in (None, task.name)]
            for task in tasks:
                busy = task.leases or any(item.waiting for item in task.subscriptions)
                if not busy and task.last_fetch <= self.state.leases.now - command.idle_s:
                    partition.reset(task.name)
            return Done()
        if command.task is None:
            self.serving.adapter.forget(partition.name)
        partition.reset(command.task)
        self.serving.serve(partition, partition.subscriptions.values())
        return Done()

    # ------------------------------------------------------------------------------------------------------ queries

    @_handlers.on(Lookup)
    def _lookup(self, command: Lookup) -> Batch:
        return queries.lookup(self.state.partitions.get(command.partition), command)

    @_handlers.on(ListKeys)
    def _list_keys(self, command: ListKeys) -> Value:
        if not command.partition:
            return Value({name: queries.tagged_keys(partition) for name, partition in self.state.partitions.items()})
        partition = self.state.partitions.get(command.partition)
        return Value({} if partition is None else {command.partition: queries.tagged_keys(partition)})

    @_handlers.on(ListPartitions)
    def _list_partitions(self, command: ListPartitions) -> Value:
        return Value(list(self.state.partitions))

    @_handlers.on(KeysOf)
    def _keys_of(self, command: KeysOf) -> Value:
        return Value(queries.keys_of(self.state.partitions.get(command.partition), command))

    @_handlers.on(ProductionStatus)
    def _production_status(self, command: ProductionStatus) -> StatusArrays:
        return queries.production_status(self.state.partitions.get(command.partition), command)

    @_handlers.on(ConsumptionStatus)
    def _consumption_status(self, command: ConsumptionStatus) -> StatusArrays:
        return queries.consumption_status(self.state.partitions.get(command.partition), command)

    @_handlers.on(Snapshot)
    def _snapshot(self, command: Snapshot) -> Value:
        if command.partition:
            partition = self.state.partitions.get(command.partition)
            if partition is None:
                raise UnknownPartitionError(f"partition {command.partition!r} not found")
            return Value(queries.count_rows(partition, self.wait_queue.waiting_for(partition.name)))
        counts = {
            name: queries.count_rows(partition, self.wait_queue.waiting_for(name))
            for name, partition in self.state.partitions.items()
        }
        return Value({"partitions": counts, **self.totals()})

    def totals(self) -> dict[str, Any]:
        """Counts of the whole controller."""
        return {
            "rows": self.state.rows,
            "sample_capacity": self.sample_capacity,
            "blocks": self.state.blocks.count,
            "waiting": len(self.wait_queue),
            "locks": self.state.locks.held,
            "lock_waiting": self.state.locks.waiting,
            "lost_units": sorted(self.state.units.lost),
        }
