"""The requests a controller answers, as data. They go over the wire as they are and drive the pure control core.

A *row* is addressed by its 64-bit global index, or by its key within a partition. A *block* is what one put stored on
one storage unit: some rows x some fields. Rows become ready when the put that produced them is committed here, which a
writer does only after storage acknowledged the block.

int arrays travel as ``bytes`` of little-endian int64 ("i64 bytes") or int32 ("i32 bytes").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from transfer_queue.control.requests import CONSUMERS, PRODUCERS, USERS, Request, Scope, union_of
from transfer_queue.control.schema import FieldSchema

__all__ = [
    "Acknowledge",
    "AnyCommand",
    "AnyReply",
    "Batch",
    "BlockRef",
    "Clear",
    "ColumnGroupLocations",
    "Command",
    "Commit",
    "Committed",
    "ConsumptionStatus",
    "Done",
    "Fetch",
    "KeysOf",
    "ListKeys",
    "ListPartitions",
    "Lock",
    "Lookup",
    "Moved",
    "ProductionStatus",
    "RenewLock",
    "Reply",
    "ResetConsumption",
    "SetTags",
    "Snapshot",
    "StatusArrays",
    "Value",
]


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """A stored block: ``rows`` rows of a put, from its row ``row_start`` on, kept by storage unit ``unit``.

    ``block`` is unique for the life of the queue (writer number in the high 32 bits, the writer's count in the low) and
    never reused. ``nbytes`` is its size in storage.
    """

    unit: int
    block: int
    row_start: int
    rows: int
    nbytes: int


class ColumnGroupLocations(msgspec.Struct, frozen=True, array_like=True):
    """The locations of the rows of a batch, for fields that were always written together.

    Row ``i`` of the batch is row ``row_in_block[i]`` of ``blocks[block_of_row[i]]`` on unit ``units[block_of_row[i]]``.
    ``block_of_row`` and ``row_in_block`` are i32 bytes of one entry per row of the batch.
    """

    fields: list[str]
    units: list[int]
    blocks: list[int]
    block_of_row: bytes
    row_in_block: bytes


# ---------------------------------------------------------------------------------------------------------- commands


class Command(Request, frozen=True, tag=True, omit_defaults=True):
    """Base of all commands. Every one names a partition except where it says otherwise.

    To add a command: its class here, a handler in ``control.core`` and the call of a client that sends it.
    """

    scope = Scope.PARTITION
    scope_without_partition: ClassVar[Scope] = Scope.PARTITION
    """Its scope with ``partition=""``, where that means all partitions."""

    partition: str

    def covers(self) -> Scope:
        return self.scope if self.partition else self.scope_without_partition


class Commit(Command, frozen=True, tag=True, omit_defaults=True):
    """Make rows exist and, if ``fields`` is given, ready. All or nothing.

    Rows: ``keys`` (created on demand, existing ones upserted), else ``indexes`` (i64 bytes; must exist), else
    ``append`` new rows without keys. ``blocks`` cover the put's rows; empty with ``fields`` empty: only rows and tags.
    ``tags``: one dict a row, merged shallowly. ``wait_s`` > 0: wait that long for the sample budget before refusing.
    ``last``: the partition gets no rows after these. ``lock``: only while this client holds the lock of this number,
    else LockLostError. ``expects``: only if the one key's row exists and its cell of each of these fields lies in this
    block (0: it has none), else RowChangedError. Answer: Committed.
    """

    roles = PRODUCERS
    mutates = True

    keys: list[str] | None = None
    indexes: bytes | None = None
    append: int = 0
    fields: list[FieldSchema] = msgspec.field(default_factory=list)
    blocks: list[BlockRef] = msgspec.field(default_factory=list)
    tags: list[dict[str, Any]] | None = None
    lengths: dict[str, bytes] = msgspec.field(default_factory=dict)
    """ragged field -> i32 bytes, elements along its first ragged axis, a row of the put each."""
    wait_s: float = 0.0
    last: bool = False
    lock: int = 0
    expects: dict[str, int] | None = None


class Lock(Command, frozen=True, tag=True, omit_defaults=True):
    """Lock ``keys``, which need not be keys of rows, all at once and in the order of requests.

    Waits up to ``wait_s`` seconds, else WaitTimeoutError. The lock ends ``lease_s`` seconds after it was granted or
    last renewed, and with the client's connection. Answer: Value({lock: number, waited: seconds}).
    """

    roles = USERS
    mutates = True

    keys: list[str]
    wait_s: float = 0.0
    lease_s: float = 30.0


class RenewLock(Command, frozen=True, tag=True, omit_defaults=True):
    """The lock of this number ends ``lease_s`` seconds from now on; 0: at once. Answer: Value(whether it is held)."""

    roles = USERS
    mutates = True

    lock: int
    lease_s: float = 0.0


class Lookup(Command, frozen=True, tag=True, omit_defaults=True):
    """Find rows by ``keys`` or ``indexes`` (i64 bytes), neither: all rows of the partition. Answer: Batch.

    ``fields`` None: the fields ready for all rows. Rows that do not exist: with ``partial`` left out, else
    KeyNotFoundError (keys) or StorageKeyNotFoundError (indexes). With ``require_ready`` a row that lacks a field
    raises NotReadyError. ``alike``: without ``fields`` too, a field that only some of the rows have. ``locate``: fill
    ``Batch.locations``.
    """

    roles = USERS

    keys: list[str] | None = None
    indexes: bytes | None = None
    fields: list[str] | None = None
    partial: bool = False
    require_ready: bool = False
    locate: bool = True
    alike: bool = False


class Fetch(Command, frozen=True, tag=True, omit_defaults=True):
    """Take ``batch_size`` rows whose ``fields`` are all ready and that ``task`` has not consumed. Answer: Batch.

    ``batch_size`` 0: as many as hold the ``token_budget`` of ``params``.

    The sampler picks; what it picks is consumed at once, or leased: with ``lease_s`` > 0, or None and a queue whose
    default is that. Leased rows are consumed once they are acknowledged; those that are not within ``lease_s`` seconds,
    or whose client is gone, are fetched again. Too few rows: with ``timeout_s`` 0 an empty Batch, else the
    request is parked until enough are ready, or WaitTimeoutError says what was missing. ``params`` go to the sampler.
    """

    roles = CONSUMERS
    mutates = True

    fields: list[str]
    batch_size: int
    task: str
    timeout_s: float = 0.0
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    locate: bool = True
    lease_s: float | None = None


class Acknowledge(Command, frozen=True, tag=True, omit_defaults=True):
    """``task`` is done with the rows ``indexes`` (i64 bytes): they are consumed, also if another client
    has them. Rows and partitions that do not exist are ignored. Answer: Done. With ``strict`` nothing changes if the
    partition knows no such task, and the answer is ``absent``."""

    roles = CONSUMERS
    mutates = True

    task: str
    indexes: bytes
    strict: bool = False


class SetTags(Command, frozen=True, tag=True, omit_defaults=True):
    """Merge ``tags`` into the rows ``indexes`` (i64 bytes). Answer: Done."""

    roles = PRODUCERS
    mutates = True

    indexes: bytes
    tags: list[dict[str, Any]]


class Clear(Command, frozen=True, tag=True, omit_defaults=True):
    """Forget rows by ``keys`` or ``indexes``; neither: the whole partition with its name. Idempotent. Answer: Done."""

    roles = CONSUMERS
    mutates = True

    keys: list[str] | None = None
    indexes: bytes | None = None


class ResetConsumption(Command, frozen=True, tag=True, omit_defaults=True):
    """Make rows fetchable again for ``task``, or for every task. Unknown names are fine. Answer: Done.

    ``idle_s`` > 0: only for tasks without a fetch and an acknowledgement for so many seconds, as of this life of the
    controller. Tasks with a waiting fetch or with leased rows are not idle.
    """

    roles = CONSUMERS
    mutates = True

    task: str | None = None
    idle_s: float = 0.0


class ListKeys(Command, frozen=True, tag=True, omit_defaults=True):
    """Keys with tags, in first-registration order; partition ``""``: of every partition.

    Answer: Value({partition: {key: tag}}).
    """

    roles = USERS
    scope_without_partition = Scope.LISTING


class ListPartitions(Command, frozen=True, tag=True, omit_defaults=True):
    """Partition names in creation order (``partition`` is ignored). Answer: Value(list)."""

    roles = USERS
    scope = scope_without_partition = Scope.LISTING


class KeysOf(Command, frozen=True, tag=True, omit_defaults=True):
    """Keys of ``indexes`` (i64 bytes), in order. Answer: Value(list); RequestError for a row without key."""

    roles = USERS

    indexes: bytes


class ProductionStatus(Command, frozen=True, tag=True, omit_defaults=True):
    """Per row and field: produced? Columns are ``fields`` in field-creation order. Answer: StatusArrays."""

    roles = USERS

    fields: list[str]


class ConsumptionStatus(Command, frozen=True, tag=True, omit_defaults=True):
    """Per row: consumed by ``task``? Answer: StatusArrays."""

    roles = USERS

    task: str


class Snapshot(Command, frozen=True, tag=True, omit_defaults=True):
    """Counts for people and metrics; partition ``""``: the whole controller. Answer: Value(dict)."""

    roles = USERS
    scope_without_partition = Scope.QUEUE


# ----------------------------------------------------------------------------------------------------------- replies


class Reply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all replies. Errors travel beside them as (class name, text)."""


class Done(Reply, frozen=True, tag=True, omit_defaults=True):
    """The command was carried out. ``absent``: there is no such partition or task, so that there was nothing to do.
    ``missing``: number of keys that a clear did not find."""

    absent: bool = False
    missing: int = 0


class Value(Reply, frozen=True, tag=True, omit_defaults=True):
    """A plain value."""

    value: Any = None


class Moved(Reply, frozen=True, tag=True, omit_defaults=True):
    """The partition is on controller ``shard``, and nothing was done: ask there. ``proof``: what to show there first,
    with a Settle; empty: nothing."""

    shard: int
    proof: str = ""


class Committed(Reply, frozen=True, tag=True, omit_defaults=True):
    """``indexes``: i64 bytes in the order of the put. ``ready``: sorted fields ready for all of its rows. ``split``: it
    continued a group of rows that an earlier put began, where the sampler takes consecutive rows as a group.
    ``late``: it made rows after a put that was said to make the last ones."""

    indexes: bytes
    ready: list[str] = []
    tags: list[dict[str, Any]] | None = None
    split: bool = False
    late: bool = False


class Batch(Reply, frozen=True, tag=True, omit_defaults=True):
    """Rows of one partition, in order. ``status`` (int8 bytes): all of the asked fields ready, a row each.

    ``tags`` is empty when no row of the partition has a tag, ``keys`` None when none has a key. ``fields``: the asked
    ones that at least one of the rows has, each with a schema true of all rows. A row that lacks the cells of a column
    group has ``block_of_row`` -1 there. ``lengths``: of those ragged fields for which they are known on all rows.
    """

    indexes: bytes
    fields: list[FieldSchema] = []
    status: bytes = b""
    tags: list[dict[str, Any]] = []
    keys: list[str | None] | None = None
    locations: list[ColumnGroupLocations] = []
    lengths: dict[str, bytes] = {}


class StatusArrays(Reply, frozen=True, tag=True, omit_defaults=True):
    """``indexes`` None: unknown partition or field. ``status``: int8 bytes, rows x columns."""

    indexes: bytes | None = None
    status: bytes = b""
    columns: list[str] = []


if TYPE_CHECKING:
    AnyCommand: TypeAlias = Command
    AnyReply: TypeAlias = Reply
else:
    AnyCommand = union_of(Command)
    AnyReply = union_of(Reply)
