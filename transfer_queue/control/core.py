"""The control plane as a state machine: commands in, replies and effects out. No sockets, no clock, no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.control import queries, state
from transfer_queue.control.arrays import Ints, compact
from transfer_queue.control.blocks import BlockTable
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
from transfer_queue.control.description import describe, validate
from transfer_queue.control.draws import Drawer
from transfer_queue.control.effects import PARKED, Effect, EffectLog, Parked
from transfer_queue.control.indexes import IndexSpace
from transfer_queue.control.leases import Lease, Leases
from transfer_queue.control.locks import Locks
from transfer_queue.control.partition import Partition
from transfer_queue.control.puts import Put, check_cells, check_put
from transfer_queue.control.records import BlocksMoved, PartitionCleared, PartitionCreated, Record, UnitJoined, UnitLost
from transfer_queue.control.replay import replay
from transfer_queue.control.requests import HandlerTable
from transfer_queue.control.serving import Serving
from transfer_queue.control.subscription import CONSUMED, Task
from transfer_queue.control.units import Units
from transfer_queue.control.waiters import LineKey, Waiter, WaitRoom
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
    Replies share no mutable state with the core except lists of field names and schemas, which are read-only.

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
        self.log = EffectLog(journal)
        self.blocks = BlockTable(self.log)
        self.space = IndexSpace(shard)
        self.partitions: dict[str, Partition] = {}
        self.units = Units(self.blocks, self.partitions)
        self.room = WaitRoom()
        self.leases = Leases(lease_s)
        self.locks = Locks(self.log)
        self.serving = Serving(self.room, self.log, Drawer(sampler or SequentialSampler(), self.leases), polling)
        self.rows = 0

    # ------------------------------------------------------------------------------------------------- host's calls

    def apply(self, command: Command, now: float, *, client: int = 0, request: int = 0) -> Reply | Parked:
        """Carry out a command. ``client`` and ``request`` name it if it has to be parked. Raises TransferQueueError."""
        handler = self._handlers.get(type(command))
        if handler is None:
            raise InvalidTypeError(f"not a command: {type(command).__name__}")
        self.log.origin = (client, request)
        self.leases.now = now
        reply: Reply | Parked = handler(self, command)
        return reply

    def cancel(self, client: int, request: int | None = None, now: float | None = None) -> None:
        """Nobody waits for the answer any more: forget one parked request of a client, or all of them."""
        self.leases.now = self.leases.now if now is None else now
        if request is None:
            waiters = self.room.of_client(client)
            self.locks.withdraw(client, None, self.leases.now)
        else:
            found = self.room.find(client, request)
            waiters = [] if found is None else [found]
            self.locks.withdraw(client, request, self.leases.now)
        self._leave(waiters)

    def disconnected(self, client: int, now: float) -> None:
        """The client's connection ended. It may come back, but its locks are over, and no request of it waits."""
        self.cancel(client, None, now)
        self.locks.disconnected(client, now)

    def client_returned(self, former: int, client: int) -> None:
        """The client that had the number ``former`` has the number ``client``: it may complete its groups."""
        for partition in self.partitions.values():
            partition.renumber_client(former, client)

    def client_gone(self, client: int, now: float) -> None:
        """The client will not be heard of again: what it has not acknowledged goes back."""
        self.disconnected(client, now)
        for partition in list(self.partitions.values()):
            for task in list(partition.tasks.values()):
                for lease in [lease for lease in task.leases.values() if lease.client == client]:
                    self._end_lease(partition, task, lease)

    def restart_leases(self, now: float) -> None:
        """After `restore` and `replay`: leases last, and tasks are idle, as if they began now."""
        self.leases.now = now
        self.leases.begin_anew()
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                task.last_fetch = now
        self.locks.begin_anew(now)

    def tick(self, now: float) -> None:
        """Take back rows whose lease is over, and answer parked requests whose deadline has come with an error."""
        self.leases.now = now
        for partition, task, lease in self.leases.expired():
            self._end_lease(partition, task, lease)
        self.locks.tick(now)
        known: dict[LineKey | None, str] = {}
        for waiter in self.room.expired(now):
            error: TransferQueueError
            if isinstance(waiter.command, Commit):
                error = self._capacity_error(waiter.command, waiter.deadline - waiter.since)
            else:
                error = self.serving.timeout_error(waiter, self.partitions.get(waiter.command.partition), known)
            self.log.answer(waiter.client, waiter.request, error)
            self._leave([waiter])

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        parts = (self.room, self.leases, self.locks)
        found = [at for at in (part.next_deadline() for part in parts) if at is not None]
        return min(found, default=None)

    def drain_effects(self) -> list[Effect]:
        """Effects since the last call: journal records first, then freed blocks, then answers."""
        return self.log.drain()

    @property
    def sampler(self) -> BaseSampler:
        return self.serving.drawer.sampler

    def set_sampler(self, sampler: BaseSampler) -> None:
        """Sample with another sampler from now on. Parked fetches are planned anew; what makes no sense to the new
        sampler is answered with an error."""
        drawer = self.serving.drawer = Drawer(sampler, self.leases)
        for partition in self.partitions.values():
            partition.requeue(drawer.queueing)
        for waiter in list(self.room):
            if isinstance(waiter.command, Fetch):
                try:
                    waiter.draw = drawer.plan(waiter.command)
                except TransferQueueError as error:
                    self.log.answer(waiter.client, waiter.request, error)
                    self.room.remove(waiter)
        for partition in self.partitions.values():
            self.serving.serve(partition, partition.subscriptions.values())

    # -------------------------------------------------------------------------------------------------- durability

    def snapshot(self) -> dict[str, Any]:
        """All state except parked requests, as plain data that msgpack can carry. A user's sampler keeps its own."""
        return state.dump(self)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Into a new core: the state that `snapshot` returned. Storage units must join with their inventories, or be
        reported lost, before what their blocks hold can be relied on."""
        state.load(self, snapshot)
        self.blocks.suspect_all()

    def replay(self, records: Iterable[Record]) -> None:
        """Into a new or a restored core: what happened since. Emits nothing; blocks that had to be freed meanwhile show
        up in `unknown_blocks` when their unit joins."""
        with self.log.silenced():
            replay(self, records)
        self.log.drain()
        self.blocks.suspect_all()

    def describe(self, *, waiters: bool = True) -> str:
        """The whole state as text, a line a row."""
        return describe(self, waiters=waiters)

    def fingerprint(self) -> str:
        """Equal for cores with equal state; parked requests do not count."""
        return hashlib.sha256(self.describe(waiters=False).encode()).hexdigest()

    def validate_state(self) -> None:
        """AssertionError if the state contradicts itself; for tests."""
        validate(self)

    # ------------------------------------------------------------------------------------------------ storage units

    def unit_lost(self, unit: int, now: float) -> None:
        """The unit's memory is gone, or it cannot be reached: rows with cells there are not ready until it joins with
        their blocks or they are written again. Commits that name the unit are refused until it joins."""
        self.leases.now = now
        self.units.lose(unit)
        if self.log.journaling:
            self.log.origin = (0, 0)
            self.log.record(UnitLost(unit))
        for partition in self.partitions.values():
            self.serving.serve_lacking(partition)
        self.admit()  # refuses the first parked commit if its blocks are gone

    def unit_suspect(self, unit: int) -> None:
        """The unit cannot be reached for now: what it holds counts, but it is asked when it joins."""
        self.units.suspect(unit)

    def unit_joined(self, unit: int, inventory: Iterable[int] | None = None, now: float | None = None) -> None:
        """The unit serves. ``inventory``: ids of the blocks it holds, None for a new unit, which holds none.

        Blocks that the core knew when the unit was suspected or lost, or when the core itself was restored, are
        confirmed or lost; younger ones are not touched, as their commit may have overtaken the inventory. A unit whose
        memory is new must be reported lost first.
        """
        self.leases.now = self.leases.now if now is None else now
        restored, lost = self.units.sort_out(unit, inventory or ())
        self._join(unit, restored, lost)

    def unit_holds(self, unit: int, blocks: Iterable[int], now: float) -> None:
        """A unit that joined tells what it has stored since it listed its inventory. Rows of such blocks were lost if
        the unit was suspected between their commit and the inventory's arrival; they are there again."""
        self.leases.now = now
        restored, _ = self.units.sort_out(unit, blocks)
        if restored:
            self._join(unit, restored, [])

    def _join(self, unit: int, restored: list[int], lost: list[int]) -> None:
        self.log.origin = (0, 0)
        if self.log.journaling:
            self.log.record(UnitJoined(unit, restored, lost))
        for partition, grown in self.units.join(unit, restored, lost):
            self.serving.serve(partition, grown)
        if lost:
            for partition in self.partitions.values():
                self.serving.serve_lacking(partition)

    def move_blocks(self, unit: int, moves: list[tuple[int, int, int]]) -> list[int]:
        """Rows of blocks of ``unit`` lie in copies from now on: (block, unit of its copy, block of its copy).

        Returns the blocks that had rows, which are freed. Raises DataLostError, and then nothing changed.
        """
        lost = sorted({unit, *(move[1] for move in moves)} & self.units.lost)
        if lost:
            raise DataLostError(f"storage unit {lost[0]} was lost while its blocks were moved or got blocks")
        blocks, units, copies = [list(column) for column in zip(*moves, strict=True)] if moves else ([], [], [])
        moved = self.units.move(unit, blocks, units, copies)
        self.log.origin = (0, 0)
        if moved and self.log.journaling:
            self.log.record(BlocksMoved(unit, blocks, units, copies))
        self.log.free(unit, moved)
        return moved

    def partitions_at(self, slots: Ints) -> list[str]:
        """Names of the partitions whose rows lie in the blocks of these slots, one each."""
        numbers = np.zeros(self.blocks.mask(slots).shape, np.int64)
        for number, partition in enumerate(self.partitions.values()):
            for family in partition.fields.families:
                numbers[np.abs(family.slot.array[: partition.table.used])] = number
        names = list(self.partitions)
        return [names[number] for number in numbers[slots].tolist()]

    def unknown_blocks(self, unit: int, blocks: list[int]) -> list[int]:
        """Those of ``blocks`` that no row refers to. A put that is not committed yet is among them: ask again after
        a grace period before freeing what a unit reports."""
        known = set(self.blocks.block.array[self.blocks.find(unit, blocks)].tolist())
        return [block for block in blocks if block not in known]

    # ------------------------------------------------------------------------------------------------------- commit

    @_handlers.on(Commit)
    def _commit(self, command: Commit) -> Reply | Parked:
        now, (client, request) = self.leases.now, self.log.origin
        partition = self.partitions.get(command.partition)
        put = check_put(partition, command)
        self._check_conditions(command, put, partition, client)
        if put.created and self.sample_capacity is not None and not self._fits(put, self.sample_capacity):
            if not command.wait_s > 0 or put.created > self.sample_capacity:
                raise self._capacity_error(command, 0)
            if self.room.find(client, request) is not None:
                raise RequestError(f"request {request} of client {client} is waiting already")
            self.room.add(Waiter(command, client, request, now, now + command.wait_s))
            return PARKED
        return self._carry_out(command, put, partition)

    def _check_conditions(self, command: Commit, put: Put, partition: Partition | None, client: int) -> None:
        """What has to hold at the moment at which the commit takes effect."""
        if self.units.lost:
            self._check_units(command)
        if command.lock:
            self.locks.check(command.partition, command.lock, client)
        if command.expects is not None:
            check_cells(partition, put, command.expects, self.blocks)

    def _check_units(self, command: Commit) -> None:
        lost = sorted({ref.unit for ref in command.blocks} & self.units.lost)
        if lost:
            raise DataLostError(f"storage unit {lost[0]} was lost before the put was committed; put the rows again")

    def _fits(self, put: Put, capacity: int) -> bool:
        return self.rows + put.created <= capacity and not self.room.commits

    def _capacity_error(self, command: Commit, waited: float) -> CapacityError:
        count = check_put(self.partitions.get(command.partition), command).created
        ahead = len(self.room.commits) - (waited > 0)
        return CapacityError(
            f"sample capacity is used up: {self.rows} of {self.sample_capacity} rows exist, {count} more "
            + (f"did not fit within {waited:g} s" if waited else "do not fit")
            + (f", {ahead} commits wait in front" if ahead > 0 else "")
            + "; clear rows, raise controller.sampleCapacity or wait longer"
        )

    def _carry_out(self, command: Commit, put: Put, partition: Partition | None) -> Committed:
        if partition is None:
            partition = self.create_partition(command.partition)
        created = partition.create(put.created, put.new_keys) if put.created else slice(0, 0)
        if put.created and partition.queueing.group > 1:
            partition.note_groups(created, self.log.origin[0])
        self.rows += put.created
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
        reply = Committed(partition.encode(rows), ready, tags or None)
        if command.last and not partition.ended:
            partition.end()
        if command.last or (command.tags is not None and not fresh and self.serving.drawer.reads_tags):
            grown = list(partition.subscriptions.values())
        for subscription in grown:
            if subscription.waiting:
                self.serving.serve(partition, grown)
                break
        return reply

    def create_partition(self, name: str) -> Partition:
        """Not for hosts: a part of commands and of replay."""
        partition = Partition(name, self.space, self.blocks, self.log, self.serving.drawer.queueing)
        self.partitions[name] = partition
        if self.log.journaling:
            self.log.record(PartitionCreated(name))
        self.serving.adopt(partition)
        return partition

    def admit(self) -> None:
        """Carry out parked commits in order, as far as the sample budget allows. Internal: hosts do not call it."""
        while self.room.commits:
            waiter = next(iter(self.room.commits.values()))
            command = waiter.command
            assert isinstance(command, Commit)
            partition = self.partitions.get(command.partition)
            result: Reply | TransferQueueError
            self.log.origin = (waiter.client, waiter.request)
            try:
                put = check_put(partition, command)
                self._check_conditions(command, put, partition, waiter.client)
                if self.rows + put.created > (self.sample_capacity or math.inf):
                    return
                self.room.remove(waiter)
                result = self._carry_out(command, put, partition)
            except TransferQueueError as error:  # what it relied on changed while it waited
                self.room.remove(waiter)
                result = error
            self.log.answer(waiter.client, waiter.request, result)

    def _leave(self, waiters: list[Waiter]) -> None:
        """Waiters go unserved, all before any of those behind them goes on."""
        for waiter in waiters:
            self.room.remove(waiter)
        for waiter in waiters:
            if isinstance(waiter.command, Commit):
                self.admit()
            elif partition := self.partitions.get(waiter.command.partition):
                subscription = partition.subscribe(waiter.command.task, tuple(waiter.command.fields))
                subscription.task.last_fetch = self.leases.now
                self.serving.serve(partition, [subscription])

    # ------------------------------------------------------------------------------------------------ fetch, change

    @_handlers.on(Fetch)
    def _fetch(self, command: Fetch) -> Batch | Parked:
        partition = self.partitions.get(command.partition)
        return self.serving.fetch(command, partition, self.leases.now, *self.log.origin)

    @_handlers.on(Acknowledge)
    def _acknowledge(self, command: Acknowledge) -> Done:
        partition = self.partitions.get(command.partition)
        positions = np.zeros(0, np.int64) if partition is None else partition.find_indexes(command.indexes)
        positions = np.unique(positions[positions >= 0])
        if partition is not None and len(positions):
            task = partition.task(command.task)
            task.last_fetch = self.leases.now
            positions = positions[task.taken[positions] != CONSUMED]
            if len(positions):
                partition.consume(task, compact(positions), CONSUMED)
        return Done()

    def _end_lease(self, partition: Partition, task: Task, lease: Lease) -> None:
        """Rows that are not acknowledged are ready again, each in its place."""
        self.log.origin = (0, 0)
        if task.leases.get(lease.number) is lease:
            grown = partition.end_lease(task, lease, partition.returning(task, lease))
            self.serving.serve(partition, grown)

    @_handlers.on(Lock)
    def _lock(self, command: Lock) -> Value | Parked:
        return self.locks.lock(command, self.leases.now)

    @_handlers.on(RenewLock)
    def _renew_lock(self, command: RenewLock) -> Value:
        return self.locks.renew(command, self.leases.now)

    @_handlers.on(SetTags)
    def _set_tags(self, command: SetTags) -> Done:
        partition = self.partitions.get(command.partition)
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
        if self.serving.drawer.reads_tags:
            self.serving.serve(partition, partition.subscriptions.values())
        return Done()

    @_handlers.on(Clear)
    def _clear(self, command: Clear) -> Done:
        if command.keys is not None and command.indexes is not None:
            raise InvalidInputError("a clear names rows by keys or by indexes, not both")
        if command.keys is not None and not command.keys:
            raise InvalidInputError("keys is an empty list")
        partition = self.partitions.get(command.partition)
        if partition is None:
            return Done(absent=True)
        if command.keys is None and command.indexes is None:
            self.serving.drawer.forget(partition.name)
            self.clear_partition(partition)
        else:
            found = partition.find_keys(command.keys) if command.keys is not None else None
            positions = partition.find_indexes(command.indexes or b"") if found is None else found
            positions = np.unique(positions[positions >= 0])
            if len(positions):
                self.rows -= len(positions)
                partition.clear(compact(positions))
                self.serving.serve_lacking(partition)
        self.admit()
        return Done()

    def clear_partition(self, partition: Partition) -> None:
        """Not for hosts: a part of commands and of replay."""
        partition.drop()
        self.rows -= partition.rows
        del self.partitions[partition.name]
        if self.log.journaling:
            self.log.record(PartitionCleared(partition.name))

    @_handlers.on(ResetConsumption)
    def _reset_consumption(self, command: ResetConsumption) -> Done:
        partition = self.partitions.get(command.partition)
        if partition is not None:
            if command.idle_s > 0:
                tasks = [task for task in partition.tasks.values() if command.task in (None, task.name)]
                for task in tasks:
                    busy = task.leases or any(item.waiting for item in task.subscriptions)
                    if not busy and task.last_fetch <= self.leases.now - command.idle_s:
                        partition.reset(task.name)
                return Done()
            if command.task is None:
                self.serving.drawer.forget(partition.name)
            partition.reset(command.task)
            self.serving.serve(partition, partition.subscriptions.values())
        return Done()

    # ------------------------------------------------------------------------------------------------------ queries

    @_handlers.on(Lookup)
    def _lookup(self, command: Lookup) -> Batch:
        return queries.lookup(self.partitions.get(command.partition), command)

    @_handlers.on(ListKeys)
    def _list_keys(self, command: ListKeys) -> Value:
        if not command.partition:
            return Value({name: queries.tagged_keys(partition) for name, partition in self.partitions.items()})
        partition = self.partitions.get(command.partition)
        return Value({} if partition is None else {command.partition: queries.tagged_keys(partition)})

    @_handlers.on(ListPartitions)
    def _list_partitions(self, command: ListPartitions) -> Value:
        return Value(list(self.partitions))

    @_handlers.on(KeysOf)
    def _keys_of(self, command: KeysOf) -> Value:
        return Value(queries.keys_of(self.partitions.get(command.partition), command))

    @_handlers.on(ProductionStatus)
    def _production_status(self, command: ProductionStatus) -> StatusArrays:
        return queries.production_status(self.partitions.get(command.partition), command)

    @_handlers.on(ConsumptionStatus)
    def _consumption_status(self, command: ConsumptionStatus) -> StatusArrays:
        return queries.consumption_status(self.partitions.get(command.partition), command)

    @_handlers.on(Snapshot)
    def _snapshot(self, command: Snapshot) -> Value:
        if command.partition:
            partition = self.partitions.get(command.partition)
            if partition is None:
                raise UnknownPartitionError(f"partition {command.partition!r} not found")
            return Value(queries.count_rows(partition, self.room.waiting_for(partition.name)))
        counts = {
            name: queries.count_rows(partition, self.room.waiting_for(name))
            for name, partition in self.partitions.items()
        }
        return Value({"partitions": counts, **self.totals()})

    def totals(self) -> dict[str, Any]:
        """Counts of the whole controller."""
        return {
            "rows": self.rows,
            "sample_capacity": self.sample_capacity,
            "blocks": self.blocks.count,
            "waiting": len(self.room),
            "locks": self.locks.held,
            "lock_waiting": self.locks.waiting,
            "lost_units": sorted(self.units.lost),
        }
