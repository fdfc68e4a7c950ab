"""Short blocking calls without the I/O thread: the calling thread sends and receives on connections of its own.

A *line* is one more connection of the client's session to the controller, and one to each storage unit that it needs.
Lines are an optimization and nothing depends on them: whatever does not go well there is done, or done again under the
same request number, over the session's own connection.
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

__all__ = ["CommitInDoubt", "Lines"]

log = logging.getLogger(__name__)

_CONTROLLER = msgspec.msgpack.Decoder(Envelope[ControllerReply])
_UNIT = msgspec.msgpack.Decoder(Envelope[UnitReply])
_CALLS = 16
"""Short calls after which a line is opened."""
_MOST = 8
"""Lines of one client. Further threads use the I/O thread."""
_IDLE_S = 4.0
"""A line that nobody used for so long is closed."""
_ANSWER_S = 1.0
"""A server that takes longer is asked again over the session's own connection."""
_PAUSE_S = 5.0
"""Time without lines after one could not be opened."""


@dataclass(eq=False)
class _Line:
    controller: BlockingConnection
    writer: int
    units: dict[str, BlockingConnection] = field(default_factory=dict)
    """By address."""
    used: float = 0.0

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


class Lines:
    """The lines of one engine. Methods are called in the threads of callers, unless they say otherwise."""

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
        self._free: list[_Line] = []
        self._all: set[_Line] = set()
        self._calls = 0
        self._not_before = 0.0
        self._opening = threading.Lock()
        self._tidying = False
        self._closed = False

    def descriptors(self) -> list[int]:
        """Sockets that a forked child must close."""
        connections = [each for line in list(self._all) for each in (line.controller, *list(line.units.values()))]
        return [number for each in connections if (number := each.fileno()) >= 0]

    def close(self) -> None:
        """Idempotent. Calls that are under way go on over the session's own connection."""
        self._closed = True
        for line in list(self._all):
            self._drop(line)

    @property
    def ready(self) -> bool:
        """Whether a short call is likely to find a line."""
        self._calls += not self._all
        return bool(self._all) or self._calls >= _CALLS

    # ---------------------------------------------------------------------------------------------------------- calls

    def request(self, command: Command) -> Reply | None:
        """The answer to a command that changes nothing and never waits. None: ask over the session."""
        line = self._take()
        if line is None:
            return None
        request, floor = self._session.begin()
        try:
            reply: Reply = line.controller.request(command, request_id=request, floor=floor)[0]
            if isinstance(reply, Moved):
                raise MovedAwayError(reply)
            return reply
        except TransferQueueError:
            if line.controller.closed:
                return None
            raise
        finally:
            self._session.end(request)
            self._give(line)

    def put(self, block: EncodedBlock, commit: Commit, in_doubt: Callable[[CommitInDoubt], None]) -> Any:
        """Store a small block and commit it: Committed, or CommitInDoubt. None: nothing took place.

        ``in_doubt`` is called on the loop with the commit that an interrupt left without an answer.
        """
        info = next(iter(self._placement.candidates(block.nbytes)), None) if block.nbytes <= INLINE_BYTES else None
        line = None if info is None else self._take()
        if info is None or line is None:
            return None
        try:
            ref = self._store(line, info, block, commit.partition)
            return None if ref is None else self._commit(line, info, ref, block, commit, in_doubt)
        finally:
            self._give(line)

    def _store(self, line: _Line, info: UnitInfo, block: EncodedBlock, partition: str) -> BlockRef | None:
        number = line.writer << 32 | next(self._counter)
        scope = partition if "ticket" in self._session.welcome.attributes else ""
        try:
            unit = self._unit(line, info)
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
        line: _Line,
        info: UnitInfo,
        ref: BlockRef,
        block: EncodedBlock,
        commit: Commit,
        in_doubt: Callable[[CommitInDoubt], None],
    ) -> Committed | CommitInDoubt | None:
        if not line.controller.is_alive():  # this process was stopped for long, and its session given up
            self._abort(line.units[info.address], ref.block, info)
            return None
        filled = msgspec.structs.replace(commit, fields=block.fields, blocks=[ref], lengths=block.lengths)
        request, floor = self._session.begin()
        doubt = CommitInDoubt(filled, ref, info, (request, line.writer))
        try:
            # A line's requests never wait; one that has to comes again, with its time, over the session.
            at_once = msgspec.structs.replace(filled, wait_s=0.0)
            reply: Committed | Moved = line.controller.request(at_once, request_id=request, floor=floor)[0]
        except TransferQueueError as error:
            if line.controller.closed or isinstance(error, JournalWriteError):
                return doubt
            self._session.end(request)
            self._abort(line.units[info.address], ref.block, info)
            return None
        except BaseException:
            self._loop.call_soon_threadsafe(in_doubt, doubt)
            raise
        self._session.end(request)
        if isinstance(reply, Moved):
            self._abort(line.units[info.address], ref.block, info)
            raise MovedAwayError(reply)
        return reply

    def read(self, backend: MemoryBackend, reads: Sequence[BlockRead]) -> Fetched | None:
        """The blocks, if they are small. None: read them over the session's connections."""
        line = self._take() if backend.may_be_small(reads) else None
        if line is None:
            return None

        def ask(info: UnitInfo, message: Any) -> tuple[BlockingConnection, Any, memoryview | None]:
            unit = self._unit(line, info)
            return (unit, *unit.request(message))

        try:
            return backend.read_small(reads, ask)
        except TransferQueueError:  # gone, overwritten, or a unit that went away: looked into over the session
            return None
        finally:
            self._give(line)

    # ---------------------------------------------------------------------------------------------------------- lines

    def _take(self) -> _Line | None:
        session = self._session
        if self._closed or not session.connected or "lines" not in session.welcome.attributes:
            return None
        while self._free:
            try:
                line = self._free.pop()
            except IndexError:  # another thread took it
                break
            if line.writer == session.writer and line.controller.is_alive():
                return line
            self._drop(line)
        self._calls += 1
        if self._calls < _CALLS or monotonic() < self._not_before or not self._opening.acquire(blocking=False):
            return None
        try:
            return self._open() if len(self._all) < _MOST else None
        finally:
            self._opening.release()

    def _open(self) -> _Line | None:
        welcome, address = self._session.welcome, self._session.connected_to
        hello = Hello("client", self._client_id, writer=welcome.writer, run=welcome.run, line=True)
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
        line = _Line(controller, welcome.writer)
        self._all.add(line)
        if self._closed:  # meanwhile
            self._drop(line)
            return None
        if not self._tidying:
            self._tidying = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _IDLE_S / 2, self._tidy)
        return line

    def _unit(self, line: _Line, info: UnitInfo) -> BlockingConnection:
        """Raises TransferQueueError."""
        found = line.units.get(info.address)
        if found is not None and found.is_alive():
            return found
        welcome = self._session.welcome
        ticket = welcome.attributes.get("ticket", b"")
        hello = Hello("client", self._client_id, writer=line.writer, run=welcome.run, ticket=ticket)
        found = line.units[info.address] = connect_blocking(
            info.address,
            hello,
            _UNIT,
            what="storage unit",
            timeout_s=_ANSWER_S,
            credentials=self._credentials,
        )
        if line not in self._all:  # closed meanwhile
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

    def _give(self, line: _Line) -> None:
        if line.controller.closed or self._closed:
            self._drop(line)
        else:
            line.used = monotonic()
            self._free.append(line)

    def _drop(self, line: _Line) -> None:
        self._all.discard(line)
        line.close()

    def _tidy(self) -> None:
        """Close idle lines. Runs on the loop."""
        oldest = monotonic() - _IDLE_S
        for line in [line for line in list(self._free) if line.used < oldest]:
            with suppress(ValueError):  # just taken
                self._free.remove(line)
                self._drop(line)
                self._calls = 0
        self._tidying = bool(self._all)
        if self._tidying:
            self._loop.call_later(_IDLE_S / 2, self._tidy)
