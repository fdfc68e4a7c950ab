"""The client's session with the controller: reconnects, and repeats requests so that each takes effect once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from transfer_queue.backoff import Backoff
from transfer_queue.client.waiting import Waits
from transfer_queue.config.trouble import Trouble, trouble_at
from transfer_queue.control.commands import Command, Fetch, Lock, Moved, Reply
from transfer_queue.control.directory import Shard
from transfer_queue.errors import (
    ConfigError,
    ConnectionLostError,
    JournalWriteError,
    NotAuthorizedError,
    NotInitializedError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.wire.messages import (
    Announce,
    Cancel,
    ControllerReply,
    Envelope,
    Hello,
    UnitInfo,
    UnitsChanged,
    Welcome,
)

__all__ = ["ControllerSession", "MovedAwayError", "silence"]

log = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(Envelope[ControllerReply])
_RETRY_S = (0.1, 1.0)
_LOOK_S = 0.5
"""Interval at which a waiting call checks whether to go on."""
_LEAST_WAIT_S = 0.001
"""A fetch that waits ends with an error, and one that does not with an empty batch."""
_SILENT_S = 5.0
"""Silence after which a server is reported: a live server sends a message at least every four seconds."""
_FIRST_REQUEST = 1000
"""Request ids of the session; connections use lower ones for the handshake."""
_ADVICE = "check that the controller runs and that TQ_CONFIG_FILE or TQ_CONTROLLER_ADDRESS names it"
_IN_DOUBT_S = 300.0
"""Time for which a fetch of unknown outcome can be asked for again."""
_SILENCE_S = 2.0
"""Time of the first attach after which a warning says what this process waits for."""


class MovedAwayError(TransferQueueError):
    """The partition of a request is on another controller, where the client's engine asks next."""

    def __init__(self, moved: Moved) -> None:
        super().__init__(f"the partition is on controller shard {moved.shard}")
        self.moved = moved


class ControllerSession:
    """Runs on the I/O loop. ``changed`` is called with each new list of storage units.

    ``shard``: which of several controllers is meant. Without it the controller says which it is, if there are several,
    and from then on it is the only one this session is with.
    """

    def __init__(
        self,
        addresses: list[str],
        client_id: str,
        keepalive: Keepalive,
        changed: Callable[[list[UnitInfo]], None],
        credentials: Credentials,
        shard: Shard | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.shard = shard
        self._waits = waits or Waits()
        self._ended = ""
        self.welcome: Welcome = Welcome("controller")
        self._addresses = addresses
        self._client_id = client_id
        self._keepalive = keepalive
        self._changed = changed
        self._credentials = credentials
        self._refused: NotAuthorizedError | ConfigError | None = None
        self.guests: frozenset[str] = frozenset()
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self._reconnecting: asyncio.Task[None] | None = None
        self._failure: TransferQueueError | None = None
        self._pending: dict[int, None] = {}
        self._in_doubt: dict[int, tuple[Fetch, float]] = {}  # given up, though the controller may have carried them out
        self._lost_at = 0.0
        self._last_words = ""  # of a controller that ends
        self._announced: dict[int, int] = {}  # block -> unit
        self._next_request = _FIRST_REQUEST
        self._numbering = threading.Lock()
        self.connected_to = ""
        """host:port of the controller that ``connection`` is with."""
        self._closed = False
        self._gone = ""

    @property
    def writer(self) -> int:
        return self.welcome.writer

    def hello_to_unit(self, writer: int) -> Hello:
        """What a connection of this session, whose number is or was ``writer``, says to a storage unit first."""
        ticket = self.welcome.attributes.get("ticket", b"")
        return Hello("client", self._client_id, writer=writer, run=self.welcome.run, ticket=ticket)

    @property
    def address(self) -> str:
        return ", ".join(self._addresses)

    @property
    def _what(self) -> str:
        return "controller" if self.shard is None else f"controller shard {self.shard.number}"

    @property
    def local_host(self) -> str:
        """The address by which this process reaches the controller."""
        return (self._connection.local_host if self._connection is not None else "") or "127.0.0.1"

    def connections(self) -> list[Connection]:
        return [] if self._connection is None else [self._connection]

    async def open(self, timeout_s: float) -> None:
        """Connect for the first time. Raises ConnectionLostError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self.start()
        said = loop.call_later(_SILENCE_S, self._say_waiting, timeout_s)
        try:
            await self._connection_until(deadline)
        except (TransferQueueError, asyncio.CancelledError):
            self.close()
            raise
        finally:
            said.cancel()

    def _say_waiting(self, timeout_s: float) -> None:
        reason = self._failure or f"no answer from the {self._what} at {self.address}"
        origin = self._credentials.target.origin
        log.warning("%s%s; trying for %g s in all", reason, f" ({origin})" if origin else "", timeout_s)

    def start(self) -> None:
        """Begin to connect; requests wait for it."""
        self._lost_at = asyncio.get_running_loop().time()
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(at_once=True))

    async def welcomed(self, timeout_s: float) -> None:
        """Return once the controller was reached for the first time. Raises ConnectionLostError."""
        if not self.welcome.run:
            await self._connection_until(asyncio.get_running_loop().time() + timeout_s)

    def close(self) -> None:
        """Idempotent; requests that wait raise NotInitializedError."""
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        if self._connection is not None:
            self._connection.close()
        self._connected.set()

    def give_up(self, reason: str) -> None:
        """The controller is gone for good: all requests raise ConnectionLostError with ``reason``."""
        self._gone = reason
        self.close()

    @property
    def ended(self) -> str:
        """Reason why the queue has ended or was replaced; empty while it may come back. Safe in any thread."""
        if self._gone:
            return self._gone
        connection = self._connection
        if connection is not None and not connection.closed:
            return ""
        if isinstance(self._failure, ConfigError):
            return str(self._failure)
        trouble = self._trouble()
        noted = trouble.text if trouble is not None and trouble.state != "restarting" else ""
        return noted or self._credentials.target.gone

    def check_open(self) -> None:
        """Raises NotInitializedError once closed and ConnectionLostError once given up. The first attach raises
        NotAuthorizedError if refused and ConfigError if the queue is not the expected one."""
        if self._refused is not None:
            raise self._refused
        if self._gone:
            raise ConnectionLostError(self._gone)
        if self._closed:
            raise NotInitializedError("this client is closed; call transfer_queue.init() to attach again")

    def announce(self, unit: int, block: int) -> None:
        """Tell the controller of a block that is about to be stored, and again after each reconnect until it is
        ``settled`` or ``withdraw``n."""
        self._announced[block] = unit
        if self._connection is not None:
            self._connection.send(Announce(unit, block))

    def withdraw(self, block: int) -> None:
        """Nothing was stored of an announced block."""
        unit = self._announced.pop(block, None)
        if unit is not None and self._connection is not None:
            self._connection.send(Announce(unit, block, withdrawn=True))

    def settled(self, block: int) -> None:
        """The controller knows more of this block than that it was announced."""
        self._announced.pop(block, None)

    @property
    def connected(self) -> bool:
        """Whether the controller is connected now. Safe in any thread."""
        connection = self._connection
        return connection is not None and not connection.closed and not self._closed

    def begin(self) -> tuple[int, int]:
        """(number, floor) of a request that another thread sends itself. Safe in any thread."""
        with self._numbering:
            request = self._new_request()
            self._pending[request] = None
            return request, next(iter(self._pending))

    def end(self, request: int) -> None:
        """A request of ``begin`` is answered, and will not be repeated. Safe in any thread."""
        with self._numbering:
            self._pending.pop(request, None)

    async def request(
        self,
        command: Command,
        timeout_s: float,
        reach_s: float | None = None,
        begun: tuple[int, int] | None = None,
    ) -> Reply:
        """Carry out ``command``, across reconnects, at most once.

        ``begun``: the number that it was sent with before, without an answer, and the writer of the session then.
        Raises what the controller raised; ConnectionLostError if it stays unreachable for ``timeout_s`` seconds, or
        was restarted while a command that changes something was under way; JournalWriteError if it cannot keep a put
        after a restart either; WaitTimeoutError, also after ``reach_s`` seconds if the controller is unreachable then.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        reach = deadline if reach_s is None else loop.time() + reach_s
        fetch_until = loop.time() + command.timeout_s if isinstance(command, Fetch) else 0.0
        doubted = self._take_up(command, loop.time()) if self._in_doubt else 0
        request, first_writer = begun or (doubted or self.begin()[0], 0)
        refused = False
        try:
            while True:
                try:
                    connection = await self._connection_until(min(deadline, reach))
                except ConnectionLostError as error:
                    for_long = reach_s is None or loop.time() - self._lost_at > timeout_s - reach_s
                    if for_long or self._ended or self._gone:
                        raise
                    if isinstance(command, Fetch) and (doubted or first_writer):
                        self._in_doubt[request] = command, loop.time()
                    raise WaitTimeoutError(f"no answer within {reach_s:g} s: {error}") from None
                if first_writer and first_writer != self.writer and command.mutates:
                    raise ConnectionLostError(
                        f"the {self._what} at {self.address} was restarted or gave this client up while "
                        f"{type(command).__name__} was under way; it may not have taken effect"
                    )
                first_writer = self.writer
                if isinstance(command, Fetch):
                    left_s = max(_LEAST_WAIT_S, fetch_until - loop.time()) if command.timeout_s else 0.0
                    command = msgspec.structs.replace(command, timeout_s=left_s)
                try:
                    return await self._ask(connection, command, request, deadline)
                except JournalWriteError as error:  # the controller ends, and what starts it again may make room
                    if refused:
                        raise
                    refused, self._last_words = True, str(error)
                    log.warning("the %s at %s: %s; asking again once it is back", self._what, self.address, error)
                except ConnectionLostError:
                    if not connection.closed:
                        raise  # the controller's own answer
                except (WaitTimeoutError, asyncio.CancelledError):
                    connection.send(Cancel(request))
                    raise
        finally:
            if request not in self._in_doubt:
                self.end(request)

    async def _ask(self, connection: Connection, command: Command, request: int, deadline: float) -> Reply:
        with self._waits.on(f"the {connection.peer}", deadline, partial(_unanswered, connection, command)):
            reply: Reply = (
                await connection.request(
                    command,
                    timeout_s=max(0.001, deadline - asyncio.get_running_loop().time()),
                    request_id=request,
                    floor=self._floor(),
                )
            )[0]
        if isinstance(reply, Moved):
            raise MovedAwayError(reply)
        return reply

    def _take_up(self, command: Command, now: float) -> int:
        """The number of a request for the same rows that was given up, so that no rows of it are lost; else 0."""
        for request, (fetch, since) in list(self._in_doubt.items()):
            same = isinstance(command, Fetch) and msgspec.structs.replace(command, timeout_s=fetch.timeout_s) == fetch
            if same or now - since > _IN_DOUBT_S:
                del self._in_doubt[request]
            if same:
                return request
            if request not in self._in_doubt:
                self.end(request)
        return 0

    def _floor(self) -> int:
        """The lowest request without an answer."""
        with self._numbering:
            return next(iter(self._pending))

    async def transfer(
        self, message: Any, payload: Sequence[memoryview | bytes], timeout_s: float
    ) -> tuple[Any, memoryview | None]:
        """A request with bytes beside it, sent once. Raises as ``request`` does, ConnectionLostError also for a
        connection that breaks meanwhile."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = await self._connection_until(deadline)
        left_s = max(0.001, deadline - loop.time())
        with self._numbering:
            request = self._new_request()
        return await connection.request(message, payload, timeout_s=left_s, request_id=request)

    def _new_request(self) -> int:
        request, self._next_request = self._next_request, self._next_request + 1
        return request

    # ------------------------------------------------------------------------------------------------------ connecting

    def lost(self) -> ConnectionLostError | None:
        """The error of a request now, if the controller is unreachable; otherwise None."""
        if self._connection is not None and not self._connection.closed:
            return None
        origin = self._credentials.target.origin
        if self._ended:
            advice = f"; {origin} names it: start it again, or unset that" if origin else ""
            return ConnectionLostError(self._ended + advice)
        advice = f"{origin} names it: check that it runs, or correct or unset that" if origin else _ADVICE
        return ConnectionLostError(f"{self._reason()}; {advice}")

    def _reason(self) -> str:
        reason = str(self._failure) if self._failure else f"cannot reach the {self._what} at {self.address}"
        trouble = self._trouble()
        return "; ".join(filter(None, [reason, trouble.text if trouble else self._last_words]))

    def _trouble(self) -> Trouble | None:
        """What is noted of this session's own queue."""
        target, uid = self._credentials.target, self.welcome.attributes.get("uid")
        return trouble_at(self._addresses, self.welcome.name or target.name, uid or target.uid)

    async def _connection_until(self, deadline: float) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        loop = asyncio.get_running_loop()
        with self._waits.on(f"the {self._what} at {self.address}", deadline, self._reason):
            while self._connection is None or self._connection.closed:
                self.check_open()
                left_s = deadline - loop.time()
                if self._ended or left_s <= 0:
                    raise self.lost() or AssertionError("connected")
                with suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._connected.wait(), min(left_s, _LOOK_S))
        return self._connection

    async def _reconnect(self, *, at_once: bool) -> None:
        backoff = Backoff(*_RETRY_S, spread=1.0)
        while not self._closed:
            if not at_once:
                await asyncio.sleep(backoff.next_s())
            at_once = False
            for address in self._addresses:
                try:
                    await self._connect(address)
                    return
                except (NotAuthorizedError, ConfigError) as error:
                    self._failure = error
                    if not self.welcome.run:  # an admitted client tries on: its new credentials may be on their way
                        self._refused = error
                        self._connected.set()
                        return
                except TransferQueueError as error:
                    self._failure = error
            trouble = self._trouble()
            # A program that starts with an address alone may wait for another queue there.
            gone = trouble is not None and (
                trouble.state == "failed"
                or (trouble.state == "down" and bool(self.welcome.run or self._credentials.target.name))
            )
            self._ended = trouble.text if trouble is not None and gone else self._credentials.target.gone

    async def _connect(self, address: str) -> None:
        hello = Hello("client", self._client_id, writer=self.welcome.writer, run=self.welcome.run)
        connection = await connect(
            address,
            hello,
            self,
            _DECODER,
            self._keepalive,
            what=self._what,
            timeout_s=10.0,
            credentials=self._credentials,
        )
        # Up to Python 3.11 wait_for may lose the cancellation by which ``close`` ends this.
        if self._closed or not self._settle(Shard.of(connection.welcome.attributes), address):
            connection.close()
            return
        before, self.welcome = self.welcome, connection.welcome
        self.guests = frozenset(self.welcome.attributes.get("guests", ()))
        if before.run and before.run != self.welcome.run:
            log.warning("the %s at %s has restarted; rows put before are gone", self._what, address)
        self._connection, self.connected_to = connection, address
        if before.writer != self.welcome.writer:  # the controller takes no announcement for another session
            self._announced.clear()
        for block, unit in self._announced.items():
            connection.send(Announce(unit, block))
        self._failure, self._ended, self._last_words = None, "", ""
        self._changed(self.welcome.units if connection.context is None else connection.context)
        self._connected.set()

    def _settle(self, found: Shard | None, address: str) -> bool:
        """Whether the controller at ``address`` is the one that this session is with: partitions are where they were
        only as long as there are the same shards."""
        if not self.welcome.run and self.shard is None:
            self.shard = found
            if found is not None:
                self._addresses = [address]
        elif found != self.shard:
            self.give_up(
                f"the {self._what} at {address} now belongs to a queue of other controllers; call "
                "transfer_queue.init() to attach to it"
            )
            return False
        return True

    # --------------------------------------------------------------------------------------------------------- Endpoint

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        connection.abort("a client serves no requests")

    def on_notice(self, connection: Connection, body: Any) -> None:
        if isinstance(body, UnitsChanged):
            if connection is self._connection:
                self._changed(body.units)
            else:  # right behind the Welcome, which is taken up in a moment
                connection.context = body.units

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        return None

    def on_lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self._connected.clear()
            self._lost_at = asyncio.get_running_loop().time()
            if not self._closed:
                self._failure = connection.lost_error()
                self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(at_once=False))


def _unanswered(connection: Connection, command: Command) -> str:
    """Return why a request has no answer; empty for a fetch that waits at a live controller."""
    dead = silence([connection])
    return dead or ("" if isinstance(command, Fetch | Lock) else f"no answer to {type(command).__name__} yet")


def silence(connections: Iterable[Connection | None]) -> str:
    """The servers that have been silent for a while; empty if none."""
    now = asyncio.get_running_loop().time()
    return ", ".join(
        f"no sign of life from the {connection.peer} for {now - connection.last_received:.0f} s"
        for connection in connections
        if connection is not None and not connection.closed and now - connection.last_received > _SILENT_S
    )
