"""The state of one controller, which commands, journal records and snapshots change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.directory import Moves, block_ids, units_of
from transfer_queue.control.effects import EffectLog
from transfer_queue.control.indexes import IndexSpace
from transfer_queue.control.lease_deadlines import LeaseDeadlines
from transfer_queue.control.locks import Locks
from transfer_queue.control.partition import Partition, Queueing
from transfer_queue.control.records import PartitionCleared, PartitionCreated
from transfer_queue.control.units import Units

__all__ = ["ControlState"]


class ControlState:
    """Everything that a snapshot keeps, and the log of what changes. Parked requests are not among it, except for
    those that wait for locks, which snapshots leave out.

    Args:
        shard: Number of this controller, a part of every row index.
        journaling: Emit a record of each change.
        lease_s: Seconds that a lease lasts if the fetch does not say; 0: fetched rows are consumed at once.
    """

    def __init__(self, *, shard: int = 0, journaling: bool = False, lease_s: float = 0.0) -> None:
        self.log = EffectLog(journaling)
        self.blocks = BlockTable(self.log)
        self.space = IndexSpace(shard)
        self.partitions: dict[str, Partition] = {}
        self.units = Units(self.blocks, self.partitions)
        self.leases = LeaseDeadlines(lease_s)
        self.locks = Locks(self.log)
        self.moves = Moves()
        self.queueing = Queueing()
        """How rows leave new partitions; the sampler decides."""
        self.rows = 0
        self.loading = False
        """Some controllers of the queue may have a checkpoint that others do not have yet."""

    def create_partition(self, name: str) -> Partition:
        """Create an empty partition."""
        partition = self.new_partition(name)
        self.partitions[name] = partition
        if self.log.journaling:
            self.log.record(PartitionCreated(name))
        return partition

    def new_partition(self, name: str) -> Partition:
        """Return a partition that does not belong to the state yet."""
        return Partition(name, self.space, self.blocks, self.log, self.queueing)

    def clear_partition(self, partition: Partition) -> None:
        """Remove a partition with all of its rows."""
        partition.drop()
        self.rows -= partition.rows
        del self.partitions[partition.name]
        if self.log.journaling:
            self.log.record(PartitionCleared(partition.name))

    def drop_arrival(self, name: str, kept: Mapping[str, Any] | None = None) -> None:
        """Forget a partition that is being received, and free its blocks except those that ``kept`` names."""
        content = self.moves.arriving.pop(name).content
        units, blocks = units_of(content), block_ids(content)
        others = np.ones(len(blocks), np.bool_) if kept is None else ~np.isin(blocks, block_ids(kept))
        for unit in np.unique(units[others]).tolist():
            self.log.free(unit, blocks[others & (units == unit)].tolist())

    def rows_by_partition(self) -> dict[str, int]:
        """Return the number of rows of each partition that has rows."""
        return {name: partition.rows for name, partition in self.partitions.items() if partition.rows}
