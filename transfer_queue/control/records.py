"""Journal records: what happened, not what was asked for, so that replay never calls a sampler.

Rows are given by *ordinal*, their position in the order of creation within the partition's life, as runs
``[start, stop, start, stop, …]`` in the order meant.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from transfer_queue.control.commands import BlockRef
from transfer_queue.control.schema import FieldSchema

__all__ = [
    "AnyRecord",
    "ArrivalDismissed",
    "BatchAssigned",
    "BlocksMoved",
    "CellsWritten",
    "ConsumptionReset",
    "LeaseEnded",
    "LoadBegan",
    "LoadEnded",
    "LockEnded",
    "LockGranted",
    "PartitionArrived",
    "PartitionCleared",
    "PartitionCreated",
    "PartitionEnded",
    "PartitionLeft",
    "PartitionSettled",
    "Record",
    "RowsCleared",
    "RowsConsumed",
    "RowsCreated",
    "RowsLeased",
    "StateAdopted",
    "TagsMerged",
    "UnitJoined",
    "UnitLost",
]


class Record(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all records."""


class PartitionCreated(Record, frozen=True, tag=True):
    partition: str


class PartitionCleared(Record, frozen=True, tag=True):
    partition: str


class PartitionEnded(Record, frozen=True, tag=True):
    """No more rows come, as a producer said."""

    partition: str


class RowsCreated(Record, frozen=True, tag=True, omit_defaults=True):
    """``count`` rows appended to the partition, with these keys if given."""

    partition: str
    count: int
    keys: list[str] | None = None


class CellsWritten(Record, frozen=True, tag=True, omit_defaults=True):
    """The fields of the rows lie in ``blocks`` now. ``lengths`` as in Commit."""

    partition: str
    rows: list[int]
    fields: list[FieldSchema]
    blocks: list[BlockRef]
    lengths: dict[str, bytes] = {}


class TagsMerged(Record, frozen=True, tag=True):
    partition: str
    rows: list[int]
    tags: list[dict[str, Any]]


class RowsConsumed(Record, frozen=True, tag=True):
    """``task`` took the rows; ``state`` 1: handed out, 2: reserved for a rank that has not asked yet."""

    partition: str
    task: str
    rows: list[int]
    state: int


class RowsLeased(Record, frozen=True, tag=True, omit_defaults=True):
    """``task`` took the rows under lease number ``lease`` of ``client`` and is to acknowledge them within ``seconds``.
    ``dealt``: as a batch of a rank."""

    partition: str
    task: str
    lease: int
    client: int
    seconds: float
    rows: list[int]
    dealt: bool = False


class LeaseEnded(Record, frozen=True, tag=True):
    """The rows go back; those under the lease are among them."""

    partition: str
    task: str
    lease: int
    rows: list[int]


class LockGranted(Record, frozen=True, tag=True):
    """``client`` holds ``keys`` of the partition as lock ``number``, by its request ``request``."""

    partition: str
    keys: list[str]
    number: int
    client: int
    request: int
    seconds: float


class LockEnded(Record, frozen=True, tag=True):
    number: int


class BatchAssigned(Record, frozen=True, tag=True):
    """The rows are what ``rank`` of ``task`` gets for its batch ``batch``, each time it asks."""

    partition: str
    task: str
    rank: int
    batch: int | str
    rows: list[int]


class ConsumptionReset(Record, frozen=True, tag=True, omit_defaults=True):
    partition: str
    task: str | None = None


class RowsCleared(Record, frozen=True, tag=True):
    partition: str
    rows: list[int]


class UnitLost(Record, frozen=True, tag=True):
    unit: int


class UnitJoined(Record, frozen=True, tag=True):
    """``restored`` blocks turned out to be there, ``lost`` ones not."""

    unit: int
    restored: list[int]
    lost: list[int]


class BlocksMoved(Record, frozen=True, tag=True):
    """``blocks`` of ``unit`` are now the blocks ``copies`` of the units ``units``."""

    unit: int
    blocks: list[int]
    units: list[int]
    copies: list[int]


class LoadBegan(Record, frozen=True, tag=True):
    """This controller takes over its part of a checkpoint with others. It has a part of a queue until LoadEnded."""


class LoadEnded(Record, frozen=True, tag=True):
    """All controllers have the checkpoint, or none."""


class StateAdopted(Record, frozen=True, tag=True):
    """The queue had no partitions and took over this state, of a checkpoint."""

    state: dict[str, Any]


class PartitionLeft(Record, frozen=True, tag=True):
    """The partition and its rows are on controller ``shard`` now, which knows ``proof``."""

    partition: str
    shard: int
    proof: str


class PartitionArrived(Record, frozen=True, tag=True):
    """Controller ``source`` may let the partition go to this one; ``content`` is its state, see `control.moves`."""

    partition: str
    seal: str
    source: int
    content: dict[str, Any]


class PartitionSettled(Record, frozen=True, tag=True):
    """An arrived partition is served; its leases have the numbers from ``lease`` on and belong to ``clients``."""

    partition: str
    lease: int
    clients: list[int]


class ArrivalDismissed(Record, frozen=True, tag=True):
    """An arrived partition stays with its source."""

    partition: str


AnyRecord: TypeAlias = (
    PartitionCreated
    | PartitionCleared
    | PartitionEnded
    | RowsCreated
    | CellsWritten
    | TagsMerged
    | RowsConsumed
    | RowsLeased
    | LeaseEnded
    | LockGranted
    | LockEnded
    | BatchAssigned
    | ConsumptionReset
    | RowsCleared
    | UnitLost
    | UnitJoined
    | BlocksMoved
    | LoadBegan
    | LoadEnded
    | StateAdopted
    | PartitionLeft
    | PartitionArrived
    | PartitionSettled
    | ArrivalDismissed
)
"""What a decoder of journal files takes: ``msgspec.msgpack.Decoder(AnyRecord)``."""
