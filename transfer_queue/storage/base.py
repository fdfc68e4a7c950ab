"""The base classes of a storage backend: a client side that moves blocks, and a unit side that owns and frees them.

A backend never knows rows, keys or partitions. It stores *blocks*: immutable bytes under a 63-bit block id that is
never reused, on a storage unit that the client chose. The controller decides when a block is dead and tells the unit.

The two sides live in different processes:

- ``Backend`` in every client, made by ``open_backend(BackendContext)``; all its methods run on the client's I/O loop;
- ``UnitStore`` in every storage unit process, made by ``open_store(StoreContext)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from transfer_queue.config.processes import Durability
from transfer_queue.wire.messages import UnitInfo, UnitStats

if TYPE_CHECKING:
    from transfer_queue.columns.block import BlockView, EncodedBlock
    from transfer_queue.columns.column import Rows

__all__ = [
    "DEVICE",
    "Backend",
    "BackendContext",
    "BlockRead",
    "Buffer",
    "Capabilities",
    "Channel",
    "Fetched",
    "FetchedBlock",
    "Peer",
    "Served",
    "ServingStore",
    "StoreContext",
    "UnitInfo",
    "UnitStats",
    "UnitStore",
]

Buffer = memoryview | bytes | bytearray
DEVICE = "device"
"""Attribute of units within a client, whose blocks lie on its GPU: in a ``UnitInfo`` the name of the GPU, in a Welcome
how to map its memory. Clients put nothing there but to their own."""
T = TypeVar("T")


@dataclass(frozen=True)
class Capabilities:
    """The properties of a backend that clients rely on. The defaults describe the least capable backend."""

    tracks_writers: bool = False
    """The unit notices by itself that the writer of an uncommitted block is gone. Without this the client announces
    every block to the controller before it stores it, and the controller frees what was never committed."""
    max_block_bytes: int | None = None
    """Larger puts are split by rows."""
    upsert: bool = False
    """A second ``put`` of one block id takes the place of the first. Without it the second is refused or ignored; block
    ids are never reused, so that this matters for repeated requests only."""
    persistent: bool = False
    """Blocks outlive the unit's process. A unit that comes back says which life it continues."""
    copies: bool = False
    """``copy`` works, and takes memory for a part of a block at a time."""
    reports_capacity: bool = False
    """``UnitStore.stats`` follows puts and frees, within a few seconds."""


@dataclass(frozen=True)
class BlockRead:
    """Rows and fields of one block; ``None`` means all. ``nbytes``: size of the whole block if the reader knows it."""

    unit: UnitInfo
    block: int
    fields: list[str] | None = None
    rows: Rows = None
    nbytes: int | None = None


class FetchedBlock(NamedTuple):
    """The answer to one BlockRead: the wanted rows are rows ``rows`` of ``view``.

    A backend may return the whole block (``rows`` as asked) or just the part (``rows`` is then ``(0, n)``). ``None``
    means all rows of the view.
    """

    view: BlockView
    rows: Rows


class Fetched(ABC):
    """Blocks that were read, in the order of the reads."""

    is_own = False
    """The memory belongs to this reader alone and may stay in use: a batch consists of writable views of it, and
    ``release`` comes with the last of them."""
    blocks: list[FetchedBlock]
    """May be emptied by the reader, so that what is made of the views is all that keeps them."""

    @abstractmethod
    def release(self) -> None:
        """Give back leases and buffers; the views are invalid afterwards. Idempotent; safe from any thread."""


class Backend(ABC):
    """Client side of a backend. Methods run on the I/O loop and may be called concurrently."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        """Store ``block`` on ``unit`` and return its size in storage (bytes), once the unit acknowledged it.

        Waits up to ``wait_s`` seconds for space. On any error nothing stays stored.
        Raises CapacityError, ConnectionLostError.
        """

    async def copy(self, source: BlockRead, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        """Store a copy of the whole block ``source`` on another unit; see ``put``. Only with ``capabilities.copies``.

        Raises as ``put``, and StorageKeyNotFoundError.
        """
        raise NotImplementedError

    @abstractmethod
    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> Fetched:
        """Read blocks, possibly from many units at once.

        Raises StorageKeyNotFoundError for a block that is gone, ConnectionLostError for a unit that cannot be reached,
        WaitTimeoutError.
        """

    @abstractmethod
    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        """Drop a block whose commit failed. If the unit cannot be reached, it goes with its writer."""

    @abstractmethod
    async def close(self) -> None:
        """Give up connections and buffers. Idempotent."""

    def renew(self, context: BackendContext) -> bool:
        """Continue in a new session of the client. False: close this backend and open another one."""
        return False

    def release_lost(self) -> None:  # noqa: B027 (the default does nothing)
        """Release what belongs to units whose connection ended. Called after a connection to a unit was lost."""

    def abandon_in_child(self) -> None:  # noqa: B027 (the default does nothing)
        """Release what the parent process holds, without a word to the units. Called in a forked child."""


class Channel(Protocol):
    """A connection to a server: requests go out, replies come back in any order. Given by the runtime."""

    @property
    def closed(self) -> bool: ...

    @property
    def welcome(self) -> Any:
        """The server's answer to the handshake."""

    async def request(
        self,
        message: Any,
        payload: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Callable[[int], memoryview] | None = None,
        late: Callable[[Any], None] | None = None,
    ) -> tuple[Any, memoryview | None]:
        """Send a message of :mod:`transfer_queue.wire.messages` and wait for (reply, payload).

        ``payload`` buffers are sent without joining them and must stay unchanged until the reply. ``into(nbytes)``
        gives the buffer that the reply's payload is received into; default: a fresh one. ``late`` gets a reply that
        comes after the caller has given up, to undo what was done for it.
        Raises what the server raised, ConnectionLostError, WaitTimeoutError.
        """

    def send(self, message: Any) -> None:
        """Send a message that has no reply. A closed channel drops it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class BackendContext:
    """The services and settings that a client gives its backend."""

    client_id: str
    writer: int
    """This client's writer number; block ids are ``(writer << 32) | count``."""
    run: str
    """Identity of the queue's life: changes when the controller starts empty."""
    settings: dict[str, Any]
    """The backend's settings, from the controller."""
    connect: Callable[[str], Awaitable[Channel]]
    """Open a channel to ``host:port`` of a unit. Raises ConnectionLostError."""
    run_copy: Callable[[Callable[[], T]], Awaitable[T]]
    """Run a long copy or blocking call on the client's worker thread (there is one); the loop stays responsive."""
    controller: str = ""
    """``host:port`` of the controller."""
    scopes: dict[int, str] = field(default_factory=dict)
    """Block -> partition of the puts under way, where storage units keep tenants apart; else empty."""


@dataclass(frozen=True)
class StoreContext:
    """The services and settings that a storage unit process gives its store."""

    name: str
    capacity: int
    """Bytes."""
    settings: dict[str, Any]
    directory: str
    """Where files of shared memory may be made (tmpfs)."""
    durability: Durability = "none"
    """Beyond none the directory is this queue's alone, and blocks in it are kept for the next process."""
    log: Callable[[str], None] = field(default=lambda text: None)
    lost: Callable[[], None] = field(default=lambda: None)
    """To be called on the loop when everything the store held is gone though this process lives on. The unit then
    registers under a new number, and the rows of the old one are reported lost."""
    shards: int = 1
    """Number of controllers of the queue."""
    in_doubt: Callable[[], None] = field(default=lambda: None)
    """To be called on the loop when some of what the store held may be gone, or may be there again. The unit then
    registers again with its inventory, and rows whose blocks are missing are reported lost."""


class UnitStore(ABC):
    """Unit side of a backend. Methods run on the unit's loop; none may block it."""

    @property
    def incarnation(self) -> str | None:
        """Identity of what the store holds, if that outlives the process; it changes when the content is lost.

        A unit that registers with the name and the incarnation of an earlier one takes over its rows, as far as its
        inventory goes.
        """
        return None

    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Return what clients need to reach this unit; plain msgpack values. Asked at each registration."""

    def registered(self, unit: int, run: str, shard: int = 0) -> None:  # noqa: B027 (the default does nothing)
        """A controller gave this unit its number. Called again after each reconnect, maybe with a new run.

        Args:
            unit: Number of this unit at that controller.
            run: Identity of the life of what that controller holds.
            shard: Which of ``StoreContext.shards`` controllers it is; the blocks of each are told apart by
                ``transfer_queue.control.directory.shard_of_block``.
        """

    @abstractmethod
    async def free(self, blocks: Sequence[int]) -> None:
        """Drop blocks; unknown ids are ignored. The memory of blocks under lease is recycled later."""

    @abstractmethod
    async def inventory(self) -> list[int]:
        """Ids of all blocks held."""

    @abstractmethod
    def stats(self) -> UnitStats: ...

    @abstractmethod
    async def close(self) -> None:
        """Give back memory, files and segments. Idempotent."""


class Peer(Protocol):
    """A client's connection as a unit's server sees it; hashable, one per connection."""

    @property
    def client_id(self) -> str: ...

    @property
    def writer(self) -> int:
        """The client's writer number; 0 for one that never writes."""


class Served(NamedTuple):
    """The answer to a client's request. ``sent`` runs once ``payload`` is no longer needed."""

    reply: Any
    payload: Sequence[Buffer] = ()
    sent: Callable[[], None] | None = None


class ServingStore(UnitStore):
    """A store whose clients send requests to the unit's own server."""

    @property
    def scopes(self) -> dict[int, str]:
        """Block -> partition of the blocks that earlier processes of this unit tagged and that are still held."""
        return {}

    def attributes(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def connected(self, peer: Peer) -> dict[str, Any]:
        """A client shook hands; the result is added to the attributes in its Welcome."""

    @abstractmethod
    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        """Answer one request, at once or by a coroutine. Raises TransferQueueErrors."""

    @abstractmethod
    def notice(self, peer: Peer, message: Any) -> None: ...

    @abstractmethod
    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        """Return the buffer for a request's payload; None: a fresh one. Raises to refuse it."""

    @abstractmethod
    def disconnected(self, peer: Peer) -> list[int]:
        """A client is gone. Returns blocks that may lack a commit; the unknown ones come back in ``free``."""
