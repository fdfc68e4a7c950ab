"""Journal records back into state, through the same methods that made the changes in the first place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from transfer_queue.control.arrays import from_runs, row_count
from transfer_queue.control.partition import Partition
from transfer_queue.control.records import (
    BatchAssigned,
    BlocksMoved,
    CellsWritten,
    ConsumptionReset,
    LeaseEnded,
    LockEnded,
    LockGranted,
    PartitionCleared,
    PartitionCreated,
    PartitionEnded,
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

if TYPE_CHECKING:
    from transfer_queue.control.core import ControlCore

__all__ = ["replay"]


def replay(core: ControlCore, records: Iterable[Record]) -> None:
    """Carry out records in order. KeyError if one names a partition that none before it created: the journal is
    incomplete."""
    for record in records:
        _STEPS[type(record)](core, record)


def _partition_created(core: ControlCore, record: PartitionCreated) -> None:
    core.create_partition(record.partition)


def _partition_cleared(core: ControlCore, record: PartitionCleared) -> None:
    core.clear_partition(core.partitions[record.partition])


def _partition_ended(core: ControlCore, record: PartitionEnded) -> None:
    core.partitions[record.partition].end()


def _rows_created(core: ControlCore, record: RowsCreated) -> None:
    core.partitions[record.partition].create(record.count, record.keys)
    core.rows += record.count


def _cells_written(core: ControlCore, record: CellsWritten) -> None:
    partition, rows = _rows(core, record)
    partition.write(rows, record.fields, record.blocks, record.lengths, fresh=False)


def _tags_merged(core: ControlCore, record: TagsMerged) -> None:
    partition, rows = _rows(core, record)
    partition.merge_tags(rows, record.tags)


def _rows_consumed(core: ControlCore, record: RowsConsumed) -> None:
    partition, rows = _rows(core, record)
    partition.consume(partition.task(record.task), rows, record.state)


def _rows_leased(core: ControlCore, record: RowsLeased) -> None:
    partition, rows = _rows(core, record)
    task = partition.task(record.task)
    ordinals = from_runs(record.rows, 0)
    lease = core.leases.grant(partition, task, record.client, ordinals, record.seconds, record.dealt, record.lease)
    partition.lease(task, rows, lease)


def _lease_ended(core: ControlCore, record: LeaseEnded) -> None:
    partition, rows = _rows(core, record)
    task = partition.task(record.task)
    partition.end_lease(task, task.leases[record.lease], rows)


def _lock_granted(core: ControlCore, record: LockGranted) -> None:
    core.locks.restore(record.partition, record.keys, record.number, record.client, record.request, record.seconds)


def _lock_ended(core: ControlCore, record: LockEnded) -> None:
    core.locks.forget(record.number)


def _batch_assigned(core: ControlCore, record: BatchAssigned) -> None:
    partition, rows = _rows(core, record)
    partition.assign(partition.task(record.task), record.rank, record.batch, rows)


def _consumption_reset(core: ControlCore, record: ConsumptionReset) -> None:
    core.partitions[record.partition].reset(record.task)


def _rows_cleared(core: ControlCore, record: RowsCleared) -> None:
    partition, rows = _rows(core, record)
    core.rows -= row_count(rows)
    partition.clear(rows)


def _unit_lost(core: ControlCore, record: UnitLost) -> None:
    core.units.lose(record.unit)


def _unit_joined(core: ControlCore, record: UnitJoined) -> None:
    core.units.join(record.unit, record.restored, record.lost)


def _blocks_moved(core: ControlCore, record: BlocksMoved) -> None:
    core.units.move(record.unit, record.blocks, record.units, record.copies)


def _state_adopted(core: ControlCore, record: StateAdopted) -> None:
    from transfer_queue.control.checkpoint import load

    load(core, record.state)


def _rows(core: ControlCore, record: Any) -> tuple[Partition, Any]:
    partition = core.partitions[record.partition]
    return partition, from_runs(record.rows, partition.base)


_STEPS: dict[type[Record], Callable[[ControlCore, Any], None]] = {
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
    StateAdopted: _state_adopted,
}
