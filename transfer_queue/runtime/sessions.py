"""The sessions of a controller: what it remembers of its clients and storage units beyond their connections."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer_queue.control.commands import Command, Commit, Reply
from transfer_queue.control.directory import writer_bits
from transfer_queue.errors import RequestError, StorageKeyNotFoundError
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.entries import SavedSession
from transfer_queue.wire.messages import Announce, Hello, UnitInfo

__all__ = ["ClientSession", "ClientSessions", "ParkedRequest", "UnitSession"]

_KEPT_REPLIES = 1024


class ParkedRequest(NamedTuple):
    """``keep``: the reply is kept for a retry. ``since``: when it came, by ``time.monotonic``."""

    keep: bool
    since: float
    command: Command


@dataclass(eq=False)
class ClientSession:
    """One client, over however many connections. ``writer`` identifies it to the core and in its block ids."""

    writer: int
    client_id: str
    connection: Connection | None = None
    lost_at: float = 0.0
    parked: dict[int, ParkedRequest] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    """block -> unit of puts that may never be committed."""
    fenced: set[int] = field(default_factory=set)
    """Blocks that were freed before their commit came; it must be refused."""
    long_answers: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one of its long answers is being made."""
    floor: int = 0
    """The client will never again ask for requests below this."""
    secondary: set[Connection] = field(default_factory=set)
    """Further connections, from the client's pool, which end with ``connection``."""
    _replies: dict[int, Reply] = field(default_factory=dict)

    def kept_reply(self, request: int) -> Reply | None:
        return self._replies.get(request)

    def keep_reply(self, request: int, reply: Reply) -> None:
        """Remember the answer of a mutating request until the client says that it has it."""
        self._replies[request] = reply
        if len(self._replies) > _KEPT_REPLIES:
            del self._replies[next(iter(self._replies))]

    def settle(self, floor: int) -> None:
        """The client will never again ask for requests below ``floor``."""
        if floor > self.floor:
            self.floor = floor
            for request in [number for number in self._replies if number < floor]:
                del self._replies[request]

    def announce(self, notice: Announce) -> None:
        """Remember a block of this session: another's would be freed with this one."""
        if notice.withdrawn:
            self.announced.pop(notice.block, None)
        elif notice.block >> 32 == self.writer:
            self.announced[notice.block] = notice.unit

    def check_commit(self, command: Commit) -> None:
        """Refuse blocks of another session and blocks that are already freed."""
        for ref in command.blocks:
            if ref.block >> 32 != self.writer:
                raise RequestError(f"block {ref.block:#x} was not written by this client session")
            if ref.block in self.fenced:
                raise StorageKeyNotFoundError(f"block {ref.block:#x} was freed before its commit; put it again")

    def speaks_over(self, connection: Connection) -> bool:
        """Whether the client still waits for answers over ``connection``."""
        return self.connection is connection or connection in self.secondary

    def end_secondary(self) -> None:
        """Close the further connections: requests that are under way there come again over the next connection."""
        for connection in list(self.secondary):
            connection.abort("the connection of its session ended")

    def saved(self) -> SavedSession:
        """Return what a restarted controller has to know."""
        return SavedSession(self.writer, self.client_id, dict(self._replies), sorted(self.fenced))

    @classmethod
    def restored(cls, saved: SavedSession) -> ClientSession:
        return cls(saved.writer, saved.client_id, fenced=set(saved.fenced), _replies=dict(saved.replies))

    def committed(self, command: Commit) -> None:
        for ref in command.blocks:
            self.announced.pop(ref.block, None)


class ClientSessions:
    """Sessions by writer number. Numbers start at random so that they differ between lives of a controller; those of
    ``shards`` controllers of one queue differ in their highest bits.

    ``opened`` is called with each new session."""

    def __init__(
        self,
        run: str,
        opened: Callable[[ClientSession], None] = lambda session: None,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.run = run
        self._opened = opened
        self._numbers = 1 << writer_bits(shards)
        self._first_writer = shard * self._numbers
        self._next_writer = 1 + secrets.randbelow(self._numbers // 2)
        self._by_writer: dict[int, ClientSession] = {}

    def admit(self, hello: Hello, connection: Connection) -> tuple[ClientSession, bool]:
        """The session of a new connection, and whether it continues an earlier one."""
        session = self._by_writer.get(hello.writer) if hello.run == self.run else None
        resumed = session is not None and session.client_id == hello.client_id
        if session is None or not resumed:
            session = ClientSession(self._new_writer(), hello.client_id)
            self._by_writer[session.writer] = session
            self._opened(session)
        session.connection = connection
        return session, resumed

    def add_secondary(self, hello: Hello, connection: Connection) -> ClientSession:
        """The session that a further connection belongs to. Raises RequestError."""
        session = self._by_writer.get(hello.writer) if hello.run == self.run else None
        if session is None or session.client_id != hello.client_id or session.connection is None:
            raise RequestError("the session of this connection has ended; attach first")
        session.secondary.add(connection)
        return session

    def _new_writer(self) -> int:
        while True:
            writer = self._first_writer + self._next_writer
            self._next_writer = self._next_writer % (self._numbers - 1) + 1
            if writer not in self._by_writer:
                return writer

    def get(self, writer: int) -> ClientSession | None:
        return self._by_writer.get(writer)

    def restore(self, saved: SavedSession) -> None:
        """A session of an earlier life of this controller."""
        self._by_writer[saved.writer] = ClientSession.restored(saved)

    def fence(self, block: int) -> bool:
        """Refuse the commit of a block that is being freed; False: its writer is gone, so that none can come."""
        session = self._by_writer.get(block >> 32)
        if session is not None:
            session.fenced.add(block)
        return session is not None

    def forget(self, writer: int) -> None:
        self._by_writer.pop(writer, None)

    def expired(self, before: float) -> list[ClientSession]:
        """Remove and return the sessions that lost their connection earlier than ``before``."""
        found = [item for item in self if item.connection is None and item.lost_at < before]
        for session in found:
            del self._by_writer[session.writer]
        return found

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(self._by_writer.values())

    def __len__(self) -> int:
        return len(self._by_writer)


@dataclass(eq=False)
class UnitSession:
    """One incarnation of a storage unit."""

    info: UnitInfo
    incarnation: str
    connection: Connection | None
    lost_at: float = 0.0
    blocks: int = 0
    draining: bool = False
    principal: str = ""
    """Who it joined as, if that was asked."""
    retired: bool = False
    """Drained and about to end: it is forgotten with its connection."""
    owed: set[int] = field(default_factory=set)
    """Blocks that were freed while it was disconnected, and that it is still to drop."""
