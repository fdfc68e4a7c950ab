"""Journal records back into state, through the same methods that made the changes in the first place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from transfer_queue.control import snapshot
from transfer_queue.control.arrays import from_runs, row_count
from transfer_queue.control.directory import Arrival
from transfer_queue.control.partition import Partition
from transfer_queue.control.records import (
    ArrivalDismissed,
    BatchAssigned,
    BlocksMoved,
    CellsWritten,
    ConsumptionReset,
    LeaseEnded,
    LoadBegan,
    LoadEnded,
    LockEnded,
    LockGranted,
    PartitionArrived,
    PartitionCleared,
    PartitionCreated,
    PartitionEnded,
    PartitionLeft,
    PartitionSettled,
    Record,
    RowsCleared,
    RowsConsumed,
    RowsCreated,
    RowsLeased,
    StateAdopted,
    TagsMerged,
    UnitJoined,
    UnitLost,
)
from transfer_queue.control.row_states import TAKES
from transfer_queue.control.state import ControlState

__all__ = ["replay"]


def replay(state: ControlState, records: Iterable[Record]) -> None:
    """Carry out records in order. KeyError if one names a partition that none before it created: the journal is
    incomplete."""
    for record in records:
        _STEPS[type(record)](state, record)


def _partition_created(state: ControlState, record: PartitionCreated) -> None:
    state.create_partition(record.partition)


def _partition_cleared(state: ControlState, record: PartitionCleared) -> None:
    state.clear_partition(state.partitions[record.partition])


def _partition_ended(state: ControlState, record: PartitionEnded) -> None:
    state.partitions[record.partition].end()


def _rows_created(state: ControlState, record: RowsCreated) -> None:
    state.partitions[record.partition].create(record.count, record.keys)
    state.rows += record.count


def _cells_written(state: ControlState, record: CellsWritten) -> None:
    partition, rows = _rows(state, record)
    partition.write(rows, record.fields, record.blocks, record.lengths, fresh=False)


def _tags_merged(state: ControlState, record: TagsMerged) -> None:
    partition, rows = _rows(state, record)
    partition.merge_tags(rows, record.tags)


def _rows_consumed(state: ControlState, record: RowsConsumed) -> None:
    partition, rows = _rows(state, record)
    partition.take(partition.task(record.task), rows, how=TAKES[record.state])


def _rows_leased(state: ControlState, record: RowsLeased) -> None:
    partition, rows = _rows(state, record)
    task = partition.task(record.task)
    ordinals = from_runs(record.rows, 0)
    lease = state.leases.grant(partition, task, record.client, ordinals, record.seconds, record.dealt, record.lease)
    partition.lease(task, rows, lease)


def _lease_ended(state: ControlState, record: LeaseEnded) -> None:
    partition, rows = _rows(state, record)
    task = partition.task(record.task)
    partition.end_lease(task, task.leases[record.lease], rows)


def _lock_granted(state: ControlState, record: LockGranted) -> None:
    state.locks.restore(record.partition, record.keys, record.number, record.client, record.request, record.seconds)


def _lock_ended(state: ControlState, record: LockEnded) -> None:
    state.locks.forget(record.number)


def _batch_assigned(state: ControlState, record: BatchAssigned) -> None:
    partition, rows = _rows(state, record)
    partition.assign(partition.task(record.task), record.rank, record.batch, rows)


def _consumption_reset(state: ControlState, record: ConsumptionReset) -> None:
    state.partitions[record.partition].reset(record.task)


def _rows_cleared(state: ControlState, record: RowsCleared) -> None:
    partition, rows = _rows(state, record)
    state.rows -= row_count(rows)
    partition.clear(rows)


def _unit_lost(state: ControlState, record: UnitLost) -> None:
    state.units.lose(record.unit)


def _unit_joined(state: ControlState, record: UnitJoined) -> None:
    state.units.join(record.unit, record.restored, record.lost)


def _blocks_moved(state: ControlState, record: BlocksMoved) -> None:
    state.units.move(record.unit, record.blocks, record.units, record.copies)


def _load_began(state: ControlState, record: LoadBegan) -> None:
    state.loading = True


def _load_ended(state: ControlState, record: LoadEnded) -> None:
    state.loading = False


def _state_adopted(state: ControlState, record: StateAdopted) -> None:
    snapshot.replace(state, record.state)


def _partition_left(state: ControlState, record: PartitionLeft) -> None:
    if record.partition in state.partitions:
        state.clear_partition(state.partitions[record.partition])
    state.moves.leave(record.partition, record.shard, record.proof)


def _partition_arrived(state: ControlState, record: PartitionArrived) -> None:
    state.moves.arriving[record.partition] = Arrival(record.seal, record.source, record.content)


def _partition_settled(state: ControlState, record: PartitionSettled) -> None:
    arrival = state.moves.arriving.get(record.partition)
    if arrival is not None:
        snapshot.enter(state, record.partition, arrival.content, record.lease, record.clients)
    state.moves.settle(record.partition)


def _arrival_dismissed(state: ControlState, record: ArrivalDismissed) -> None:
    del state.moves.arriving[record.partition]


def _rows(state: ControlState, record: Any) -> tuple[Partition, Any]:
    partition = state.partitions[record.partition]
    return partition, from_runs(record.rows, partition.base)


_STEPS: dict[type[Record], Callable[[ControlState, Any], None]] = {
    PartitionCreated: _partition_created,
    PartitionCleared: _partition_cleared,
    PartitionEnded: _partition_ended,
    RowsCreated: _rows_created,
    CellsWritten: _cells_written,
    TagsMerged: _tags_merged,
    RowsConsumed: _rows_consumed,
    RowsLeased: _rows_leased,
    LeaseEnded: _lease_ended,
    LockGranted: _lock_granted,
    LockEnded: _lock_ended,
    BatchAssigned: _batch_assigned,
    ConsumptionReset: _consumption_reset,
    RowsCleared: _rows_cleared,
    UnitLost: _unit_lost,
    UnitJoined: _unit_joined,
    BlocksMoved: _blocks_moved,
    LoadBegan: _load_began,
    LoadEnded: _load_ended,
    StateAdopted: _state_adopted,
    PartitionLeft: _partition_left,
    PartitionArrived: _partition_arrived,
    PartitionSettled: _partition_settled,
    ArrivalDismissed: _arrival_dismissed,
}
