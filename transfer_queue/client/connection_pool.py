"""Short blocking calls without the I/O thread: the calling thread sends and receives on connections of its own.

An entry of the pool is one more connection of the client's session to the controller, and one to each storage unit
that it uses. The pool is an optimization and nothing depends on it: a call that fails there is repeated over the
session's own connection, under the same request number.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.client.placement import Placement
from transfer_queue.client.session import ControllerSession, MovedAwayError
from transfer_queue.control.commands import BlockRef, Command, Commit, Committed, Moved, Reply
from transfer_queue.errors import JournalWriteError, TransferQueueError
from transfer_queue.runtime.blocking import BlockingConnection, connect_blocking
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import UnitInfo
from transfer_queue.storage.memory.client import INLINE_BYTES, MemoryBackend
from transfer_queue.wire.messages import Abort, ControllerReply, Envelope, Hello, Put, UnitReply

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from transfer_queue.columns.block import EncodedBlock
    from transfer_queue.storage.base import BlockRead, Fetched

__all__ = ["CommitInDoubt", "ConnectionPool"]

log = logging.getLogger(__name__)

_CONTROLLER = msgspec.msgpack.Decoder(Envelope[ControllerReply])
_UNIT = msgspec.msgpack.Decoder(Envelope[UnitReply])
_CALLS = 16
"""Short calls after which an entry is opened."""
_MOST = 8
"""Entries of one client. Further threads use the I/O thread."""
_IDLE_S = 4.0
"""An entry that is not used for this time is closed."""
_LOST_S = 20.0
"""An entry that a call has for this time is closed: an interrupt ended the call before it gave the entry back."""
_ANSWER_S = 1.0
"""A server that takes longer is asked again over the session's own connection."""
_PAUSE_S = 5.0
"""Time without attempts after an entry could not be opened."""


@dataclass(eq=False)
class _Entry:
    controller: BlockingConnection
    writer: int
    units: dict[str, BlockingConnection] = field(default_factory=dict)
    """By address."""
    used: float = field(default_factory=monotonic)
    """When a call took it, or gave it back."""

    def close(self) -> None:
        for connection in (self.controller, *self.units.values()):
            connection.close()


@dataclass(frozen=True)
class CommitInDoubt:
    """A commit that was sent and got no answer. It is to be repeated with its number."""

    commit: Commit
    ref: BlockRef
    unit: UnitInfo
    begun: tuple[int, int]
    """See ``ControllerSession.request``."""


class ConnectionPool:
    """The pool of one engine. Methods are called in the threads of callers, unless they say otherwise."""

    def __init__(
        self,
        session: ControllerSession,
        placement: Placement,
        credentials: Credentials,
        client_id: str,
        counter: itertools.count[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._session = session
        self._placement = placement
        self._credentials = credentials
        self._client_id = client_id
        self._counter = counter
        self._loop = loop
        self._free: list[_Entry] = []
        self._all: set[_Entry] = set()
        self._calls = 0
        self._not_before = 0.0
        self._opening = threading.Lock()
        self._tidying = False
        self._closed = False

    def descriptors(self) -> list[int]:
        """Sockets that a forked child must close."""
        connections = [each for entry in list(self._all) for each in (entry.controller, *list(entry.units.values()))]
        return [number for each in connections if (number := each.fileno()) >= 0]

    def close(self) -> None:
        """Idempotent. Calls that are under way go on over the session's own connection."""
        self._closed = True
        for entry in list(self._all):
            self._drop(entry)

    @property
    def ready(self) -> bool:
        """Whether a short call is likely to find an entry."""
        self._calls += not self._all
        return bool(self._all) or self._calls >= _CALLS

    # ---------------------------------------------------------------------------------------------------------- calls

    def request(self, command: Command) -> Reply | None:
        """The answer to a command that changes nothing and never waits. None: ask over the session."""
        entry = self._take()
        if entry is None:
            return None
        request, floor = self._session.begin()
        try:
            reply: Reply = entry.controller.request(command, request_id=request, floor=floor)[0]
            if isinstance(reply, Moved):
                raise MovedAwayError(reply)
            return reply
        except TransferQueueError:
            if entry.controller.closed:
                return None
            raise
        finally:
            self._session.end(request)
            self._give(entry)

    def put(self, block: EncodedBlock, commit: Commit, in_doubt: Callable[[CommitInDoubt], None]) -> Any:
        """Store a small block and commit it: Committed, or CommitInDoubt. None: nothing took place.

        ``in_doubt`` is called on the loop with the commit that an interrupt left without an answer.
        """
        info = next(iter(self._placement.candidates(block.nbytes)), None) if block.nbytes <= INLINE_BYTES else None
        entry = None if info is None else self._take()
        if info is None or entry is None:
            return None
        try:
            ref = self._store(entry, info, block, commit.partition)
            return None if ref is None else self._commit(entry, info, ref, block, commit, in_doubt)
        finally:
            self._give(entry)

    def _store(self, entry: _Entry, info: UnitInfo, block: EncodedBlock, partition: str) -> BlockRef | None:
        number = entry.writer << 32 | next(self._counter)
        scope = partition if "ticket" in self._session.welcome.attributes else ""
        try:
            unit = self._unit(entry, info)
        except TransferQueueError:
            return None
        try:
            unit.request(Put(number, 0.0, scope), block.segments())
        except BaseException as error:
            self._abort(unit, number, info)
            if isinstance(error, TransferQueueError):
                return None
            raise
        return BlockRef(info.unit, number, 0, block.rows, block.nbytes)

    def _commit(
        self,
        entry: _Entry,
        info: UnitInfo,
        ref: BlockRef,
        block: EncodedBlock,
        commit: Commit,
        in_doubt: Callable[[CommitInDoubt], None],
    ) -> Committed | CommitInDoubt | None:
        if not entry.controller.is_alive():  # this process was stopped for long, and its session given up
            self._abort(entry.units[info.address], ref.block, info)
            return None
        filled = msgspec.structs.replace(commit, fields=block.fields, blocks=[ref], lengths=block.lengths)
        request, floor = self._session.begin()
        doubt = CommitInDoubt(filled, ref, info, (request, entry.writer))
        try:
            # Requests of the pool never wait; one that has to is repeated over the session, with its time.
            at_once = msgspec.structs.replace(filled, wait_s=0.0)
            reply: Committed | Moved = entry.controller.request(at_once, request_id=request, floor=floor)[0]
        except TransferQueueError as error:
            if entry.controller.closed or isinstance(error, JournalWriteError):
                return doubt
            self._session.end(request)
            self._abort(entry.units[info.address], ref.block, info)
            return None
        except BaseException:
            self._loop.call_soon_threadsafe(in_doubt, doubt)
            raise
        self._session.end(request)
        if isinstance(reply, Moved):
            self._abort(entry.units[info.address], ref.block, info)
            raise MovedAwayError(reply)
        return reply

    def read(self, backend: MemoryBackend, reads: Sequence[BlockRead]) -> Fetched | None:
        """The blocks, if they are small. None: read them over the session's connections."""
        entry = self._take() if backend.may_be_small(reads) else None
        if entry is None:
            return None

        def ask(info: UnitInfo, message: Any) -> tuple[BlockingConnection, Any, memoryview | None]:
            unit = self._unit(entry, info)
            return (unit, *unit.request(message))

        try:
            return backend.read_small(reads, ask)
        except TransferQueueError:  # gone or overwritten, or its unit went away: the session finds out
            return None
        finally:
            self._give(entry)

    # -------------------------------------------------------------------------------------------------------- entries

    def _take(self) -> _Entry | None:
        session = self._session
        if self._closed or not session.connected or "secondary" not in session.welcome.attributes:
            return None
        while self._free:
            try:
                entry = self._free.pop()
            except IndexError:  # another thread took it
                break
            entry.used = monotonic()
            if entry.writer == session.writer and entry.controller.is_alive():
                return entry
            self._drop(entry)
        self._calls += 1
        if self._calls < _CALLS or monotonic() < self._not_before or not self._opening.acquire(blocking=False):
            return None
        try:
            return self._open() if len(self._all) < _MOST else None
        finally:
            self._opening.release()

    def _open(self) -> _Entry | None:
        welcome, address = self._session.welcome, self._session.connected_to
        hello = Hello("client", self._client_id, writer=welcome.writer, run=welcome.run, secondary=True)
        try:
            controller = connect_blocking(
                address,
                hello,
                _CONTROLLER,
                what="controller",
                timeout_s=_ANSWER_S,
                credentials=self._credentials,
            )
        except TransferQueueError as error:
            log.info("short calls use the I/O thread for now: %s", error)
            self._not_before = monotonic() + _PAUSE_S
            return None
        entry = _Entry(controller, welcome.writer)
        self._all.add(entry)
        if self._closed:  # meanwhile
            self._drop(entry)
            return None
        if not self._tidying:
            self._tidying = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _IDLE_S / 2, self._tidy)
        return entry

    def _unit(self, entry: _Entry, info: UnitInfo) -> BlockingConnection:
        """Raises TransferQueueError."""
        found = entry.units.get(info.address)
        if found is not None and found.is_alive():
            return found
        hello = self._session.hello_to_unit(entry.writer)
        found = entry.units[info.address] = connect_blocking(
            info.address,
            hello,
            _UNIT,
            what="storage unit",
            timeout_s=_ANSWER_S,
            credentials=self._credentials,
        )
        if entry not in self._all:  # closed meanwhile
            found.close()
        return found

    def _abort(self, unit: BlockingConnection, block: int, info: UnitInfo) -> None:
        """Drop a block that will not be committed, also if the unit has yet to read that it is to be stored."""
        unit.send(Abort(block))
        if unit.closed:
            with suppress(RuntimeError):  # the loop is closed, and the block goes with its writer
                self._loop.call_soon_threadsafe(self.discard, block, info)

    discard: Callable[[int, UnitInfo], None]
    """Drops a block over the session's connection to the unit; called on the loop."""

    def _give(self, entry: _Entry) -> None:
        if entry.controller.closed or self._closed:
            self._drop(entry)
        else:
            entry.used = monotonic()
            self._free.append(entry)

    def _drop(self, entry: _Entry) -> None:
        self._all.discard(entry)
        entry.close()

    def _tidy(self) -> None:
        """Close entries that are idle or lost. Runs on the loop."""
        now = monotonic()
        oldest = now - _IDLE_S
        for entry in [entry for entry in list(self._free) if entry.used < oldest]:
            with suppress(ValueError):  # just taken
                self._free.remove(entry)
                self._drop(entry)
                self._calls = 0
        for entry in [entry for entry in list(self._all) if entry.used < now - _LOST_S]:
            self._drop(entry)
        self._tidying = bool(self._all)
        if self._tidying:
            self._loop.call_later(_IDLE_S / 2, self._tidy)
