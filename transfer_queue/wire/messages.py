"""Everything that travels between processes besides the commands of :mod:`transfer_queue.control.commands`.

A connection begins with a request ``Hello`` and its reply ``Welcome``, or ``Challenge`` and Hello once more; any
other first message closes it. Afterwards both sides may send requests (answered by a reply or ``Failure`` of the same
id) and notices (never answered).
"i64 bytes": little-endian int64 array; "i32 bytes": int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import msgspec

from transfer_queue._printable import printable
from transfer_queue.control import commands
from transfer_queue.control.requests import CONSUMERS, PRODUCERS, USERS, Request, Roles, Scope, union_of
from transfer_queue.errors import InvalidTypeError, RequestError, TransferQueueError, error_class
from transfer_queue.wire.base import FromController, Message

__all__ = [
    "ENCODER",
    "PROTOCOL",
    "Abort",
    "Adopt",
    "Alloc",
    "Announce",
    "Cancel",
    "Capture",
    "Captured",
    "Challenge",
    "ControllerReply",
    "ControllerRequest",
    "DeviceHandle",
    "Drain",
    "EndCapture",
    "Envelope",
    "Extent",
    "Extents",
    "Failure",
    "Fill",
    "FreeBlocks",
    "FromUnit",
    "Hello",
    "Holding",
    "Join",
    "Joined",
    "Kind",
    "Look",
    "MapDevice",
    "Open",
    "Put",
    "Read",
    "ReadPart",
    "Release",
    "Relocate",
    "ReportOrphans",
    "Retire",
    "Seal",
    "Stats",
    "Stored",
    "SubBlocks",
    "Sweep",
    "Swept",
    "ToUnit",
    "Trace",
    "UnitInfo",
    "UnitReply",
    "UnitReport",
    "UnitRequest",
    "UnitStats",
    "UnitsChanged",
    "Welcome",
]


def _plain_value(value: Any) -> Any:
    """Scalars of numpy and torch in tags and parameters travel as plain numbers, subclasses of plain types as these."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise InvalidTypeError(
        f"tags and parameters are plain values (str, numbers, bool, None, bytes, lists, dicts), not "
        f"{type(value).__name__}; put other values as fields"
    )


ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain_value)
"""Encodes every message."""

PROTOCOL = 1
"""Version of messages. Peers of different versions refuse each other in the handshake."""

B = TypeVar("B")


class Kind:
    """What an envelope is."""

    REQUEST = 0
    REPLY = 1
    NOTICE = 2
    PING = 3
    MORE_REQUEST = 4
    """Further payload of the request with this id."""
    MORE_REPLY = 5


class Envelope(msgspec.Struct, Generic[B], array_like=True, omit_defaults=True):
    """The header of a frame. ``total``: payload bytes of the whole message, over all of its frames.

    ``floor``: requests below this id are settled at the sender, their kept replies may be forgotten.
    """

    kind: int
    id: int = 0
    total: int = 0
    body: B | None = None
    floor: int = 0


class ToUnit(Message, frozen=True, tag=True, omit_defaults=True):
    """Base of the requests and notices that a storage unit takes from clients."""

    roles: ClassVar[Roles] = frozenset()
    """Who may send it as a request: any one of these roles. None: it is a notice."""
    copies: ClassVar[bool] = False
    """It is a part of emptying a unit, so that the role ``storage`` may send it for every partition."""
    maps_memory: ClassVar[bool] = False
    """It is a part of access through shared memory, in which the bytes of every partition lie."""

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        """Return the partitions that it is about; None is all of them. ``tags``: block -> partition."""
        return []


class FromUnit(Message, frozen=True, tag=True, omit_defaults=True):
    """Base of a storage unit's replies to clients."""


class UnitInfo(msgspec.Struct, frozen=True, array_like=True):
    """A storage unit as clients see it. ``attributes`` is what its store reported with ``UnitStore.attributes()``."""

    unit: int
    name: str
    address: str
    """host:port of the unit's own server; empty if clients never talk to it."""
    capacity: int
    """Bytes."""
    used: int = 0
    """Bytes held by blocks when the unit last reported."""
    draining: bool = False
    """Readable, but takes no new blocks."""
    attributes: dict[str, Any] = {}


class UnitStats(msgspec.Struct, frozen=True):
    """What a unit holds, in bytes and blocks."""

    capacity: int
    used: int
    blocks: int


# --------------------------------------------------------------------------------------------------------- handshake


class Hello(Message, frozen=True, tag=True, omit_defaults=False):  # protocol must be said, not assumed
    """First message of a connection. ``writer``/``run``: of an earlier Welcome, to resume after a broken connection."""

    role: Literal["client", "unit"]
    client_id: str
    protocol: int = PROTOCOL
    writer: int = 0
    run: str = ""
    token: str = ""
    ticket: bytes = b""
    """To a storage unit: the controller's proof of whose ``writer`` is; from ``Welcome.attributes``."""
    nonce: bytes = b""
    proof: bytes = b""
    """Proof that the peer knows the queue's secret, in the second Hello; see ``runtime.secret``."""
    secondary: bool = False
    """To a controller whose Welcome has the attribute ``secondary``: one more connection of the session ``writer``, for
    requests whose answers come at once. It ends with the session's own connection."""

    def __repr__(self) -> str:
        return f"Hello(role={self.role!r}, client_id={self.client_id!r})"  # without the secrets


class Welcome(Message, frozen=True, tag=True, omit_defaults=False):  # protocol must be said, not assumed
    """The answer to Hello. A controller fills all of it, a storage unit ``server``, timing and ``attributes``."""

    server: Literal["controller", "unit"]
    protocol: int = PROTOCOL
    name: str = ""
    run: str = ""
    writer: int = 0
    resumed: bool = False
    backend: str = ""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    units: list[UnitInfo] = msgspec.field(default_factory=list)
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)


class Challenge(Message, frozen=True, tag=True, omit_defaults=True):
    """The answer to the first Hello at a server with a secret.

    The peer says Hello again, with a proof for its own nonce followed by this one.
    """

    nonce: bytes


class Failure(Message, frozen=True, tag=True, omit_defaults=True):
    """A refused request; raised at the caller as the same class with the same text, in one line without control
    characters: the peer may be any program."""

    error: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        name = type(error).__name__
        if isinstance(error, TransferQueueError) and (error_class(name) is not RequestError or name == "RequestError"):
            return cls(name, str(error))
        return cls("RequestError", f"{name}: {error}")

    def exception(self) -> TransferQueueError:
        return error_class(self.error)(printable(self.text))


# ---------------------------------------------------------------------------------------- controller, besides Commands


class Announce(Request, frozen=True, tag=True, omit_defaults=True):
    """Notice of a writer: block ``block`` is about to be stored on ``unit``. Freed if it never commits.

    ``withdrawn``: it was announced, and refused; nothing is stored.
    """

    unit: int
    block: int
    withdrawn: bool = False


class Look(Request, frozen=True, tag=True, omit_defaults=True):
    """The dataflow as people want to see it. Answer: Value(dict), see ``runtime.picture``."""


class Trace(Request, frozen=True, tag=True, omit_defaults=True):
    """``most`` > 0: keep a record of the newest so many events from now on, until this connection ends. 0: end it and
    answer with it. Answer: Value(list), see ``runtime.tracing``."""

    most: int = 0


class Cancel(Request, frozen=True, tag=True, omit_defaults=True):
    """Notice of a client: it no longer waits for this request of its own."""

    request: int


class Capture(Request, frozen=True, tag=True, omit_defaults=True):
    """Give me the whole state, and keep its blocks readable until EndCapture or the end of this connection.

    ``token`` of the client's choice tells captures of one connection apart.

    Answer: Captured with the state as payload, msgpack of ``control.checkpoint.capture``.

    ``hold``: put off requests that change rows until Resume, for a few seconds at most. The captures of several shards
    that all hold are one consistent cut.
    """

    hold: bool = False
    token: int = 0


class Captured(FromController, frozen=True, tag=True, omit_defaults=True):
    """See Capture."""


class Resume(Request, frozen=True, tag=True, omit_defaults=True):
    """End the hold of this connection's capture with ``token``. Answer: Done; RequestError if the hold took too long
    and had ended."""

    token: int = 0


class EndCapture(Request, frozen=True, tag=True, omit_defaults=True):
    """The blocks of the capture with ``token`` have been read. Answer: Done."""

    token: int = 0


class Adopt(Request, frozen=True, tag=True, omit_defaults=True):
    """Take over the state in the payload (see Capture), whose blocks this client has stored. Answer: Done.

    ``replace``: in place of all rows that are there; else QueueNotEmptyError if there are some. ``step``: of a load
    into several controllers, where all of them ``begin``, then take over their state, then ``end``. Requests for rows
    wait meanwhile. After ``leave``, or the end of the connection, they are refused. ``ask``: whether they are refused;
    answer: Value(bool).
    """

    replace: bool = False
    step: Literal["", "ask", "begin", "end", "leave"] = ""


class Drain(Request, frozen=True, tag=True, omit_defaults=True):
    """No new blocks for the storage unit called ``name`` (``stop``: again some, it is not to be drained).

    Answer: Value({unit: number, blocks: i64 bytes, nbytes: i64 bytes, partitions: names}), blocks that rows refer to
    there, ``most`` at most, and the partition of each. Holds until the unit registers again.
    RequestError for an unknown name.
    """

    scope = Scope.UNIT

    name: str
    most: int = 0
    stop: bool = False


class Relocate(Request, frozen=True, tag=True, omit_defaults=True):
    """This client has stored copies of blocks of ``unit``; rows shall lie there from now on. ``moves``: (block, unit
    of its copy, block of its copy). Answer: Value(list), those blocks whose rows moved; the others have none left."""

    scope = Scope.UNIT

    unit: int
    moves: list[tuple[int, int, int]]


class Retire(Request, frozen=True, tag=True, omit_defaults=True):
    """The drained unit is about to end: commits that name it are refused, so that their writers store elsewhere.

    Answer: Value(bool); False: it is not empty.
    """

    scope = Scope.UNIT

    unit: int


class UnitsChanged(FromController, frozen=True, tag=True, omit_defaults=True):
    """Notice to clients: the storage units are now these."""

    units: list[UnitInfo]


class Holding(Request, frozen=True, tag=True):
    """Notice of a unit: before it joins, that it holds these blocks (i64 bytes) besides those of its Join; after that,
    that it has stored them since it listed those."""

    blocks: bytes


class Join(Request, frozen=True, tag=True, omit_defaults=True):
    """A storage unit registers. ``incarnation``: random, new whenever its memory is. ``blocks``: what it holds, i64
    bytes; more than fit into a frame were sent ahead as Holding. ``held``: how many that makes in all."""

    scope = Scope.SENDER

    name: str
    incarnation: str
    address: str
    capacity: int
    used: int = 0
    blocks: bytes = b""
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)
    held: int = 0


class Joined(FromController, frozen=True, tag=True, omit_defaults=True):
    """``unknown``: blocks of the inventory that no row refers to (i64 bytes); the unit frees them."""

    unit: int
    run: str
    unknown: bytes = b""
    ticket_key: bytes = b""
    """Proves tickets; empty without a policy."""

    def __repr__(self) -> str:
        return f"Joined(unit={self.unit!r}, run={self.run!r})"


class UnitReport(Request, frozen=True, tag=True, omit_defaults=True):
    """Notice of a unit: how full it is."""

    stats: UnitStats


class ReportOrphans(Request, frozen=True, tag=True, omit_defaults=True):
    """Notice of a unit: the writer of these blocks (i64 bytes) is gone. The controller frees what was not committed."""

    blocks: bytes


class FreeBlocks(FromController, frozen=True, tag=True, omit_defaults=True):
    """Notice to a unit: no row refers to these blocks (i64 bytes) any more."""

    blocks: bytes


# ------------------------------------------------------------------------------------------------------- storage unit


class Put(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Store a small block whose bytes are the payload. Answer: Stored."""

    roles = PRODUCERS
    copies = True

    block: int
    wait_s: float = 0.0
    scope: str = ""
    """The partition it is for; asked for by units that keep tenants apart."""

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [self.scope]


class Alloc(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Reserve space for a block. Answer: Extent; CapacityError if none frees up within ``wait_s`` seconds.

    ``pieces``: the writer sends the block by Fill where the answer says that the space is in pieces.
    """

    roles = PRODUCERS
    copies = True

    block: int
    nbytes: int
    wait_s: float = 0.0
    scope: str = ""
    pieces: bool = False

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [self.scope]


class Fill(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """The payload is the whole content of an allocated block; seals it. Answer: Stored."""

    roles = PRODUCERS
    copies = True

    block: int

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [tags.get(self.block, "")]


class Seal(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """The writer filled the block through shared memory. Answer: Stored."""

    roles = PRODUCERS
    maps_memory = True

    block: int

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [tags.get(self.block, "")]


class Abort(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Notice: drop a block that will not be committed."""

    block: int


class ReadPart(msgspec.Struct, frozen=True, array_like=True):
    """``rows``: ``(start, stop)``, i32 bytes of positions, or None for all."""

    block: int
    fields: list[str] | None = None
    rows: tuple[int, int] | bytes | None = None


class Read(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Answer: SubBlocks with the sub-blocks one after the other as payload."""

    roles = CONSUMERS
    copies = True

    parts: list[ReadPart]

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [tags.get(part.block, "") for part in self.parts]


class Open(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Lease blocks for reading through shared memory. Answer: Extents."""

    roles = CONSUMERS
    maps_memory = True

    blocks: list[int]

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [tags.get(block, "") for block in self.blocks]


class MapDevice(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """The client maps the memory of the unit's GPU now. Answer: DeviceHandle."""

    roles = CONSUMERS
    maps_memory = True

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [None]


class Release(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Notice: the lease is over."""

    lease: int


class Sweep(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Which dead blocks is this client to remove from a store that only clients reach? ``removed``: those it removed
    (i64 bytes). Answer: Swept, as soon as there are any or ``wait_s`` seconds have passed."""

    roles = CONSUMERS

    removed: bytes = b""
    wait_s: float = 0.0

    def partitions(self, tags: Mapping[int, str]) -> list[str | None]:
        return [None]


class Stats(ToUnit, frozen=True, tag=True, omit_defaults=True):
    """Answer: Stored."""

    roles = USERS
    copies = True


class Extent(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """Offset of an allocated block in the arena; -1: it is in pieces, which only the unit writes and reads."""

    offset: int


class Extents(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """(offset, bytes) of each opened block, readable until the lease is released or the connection ends.

    Lease 0: the blocks are small, or not in memory in one piece, and came as the payload, which the offsets then refer
    to.
    """

    lease: int
    extents: list[tuple[int, int]]


class DeviceHandle(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """What torch's CUDA IPC needs to map the memory, once; empty: CUDA does not export it."""

    handle: list[Any]


class Stored(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """The block is readable; ``stats``: how full the unit is now."""

    stats: UnitStats


class SubBlocks(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """Bytes of each sub-block in the payload."""

    sizes: list[int]


class Swept(FromUnit, frozen=True, tag=True, omit_defaults=True):
    """Dead blocks (i64 bytes). The payload is what their writers left about each; ``sizes``: bytes of each of these."""

    blocks: bytes
    sizes: list[int]


if TYPE_CHECKING:
    ControllerRequest: TypeAlias = Hello | Request
    ControllerReply: TypeAlias = Message | commands.Reply
    UnitRequest: TypeAlias = Hello | ToUnit
    UnitReply: TypeAlias = Message | commands.Done
else:
    import transfer_queue.wire.moves  # noqa: F401  its requests and replies belong to the unions

    ControllerRequest = union_of(Hello, Request)
    ControllerReply = union_of(Challenge, Welcome, Failure, FromController, commands.Reply)
    UnitRequest = union_of(Hello, ToUnit)
    UnitReply = union_of(Challenge, Welcome, Failure, FromUnit, commands.Done)
