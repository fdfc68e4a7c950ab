"""One TCP connection between two processes: requests multiplexed by id, payloads received where they belong.

Payload buffers go out by scatter/gather and are never joined; long payloads are sent in pieces between which short
messages pass. The sender stops taking pieces while the socket is full, so nothing piles up in memory.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np

from transfer_queue.config.attach import join_address
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError
from transfer_queue.runtime.unsent import Unsent
from transfer_queue.wire.frames import (
    DEFAULT_LIMITS,
    Buffer,
    Incoming,
    Limits,
    MessageReader,
    MessageWriter,
    ProtocolError,
)
from transfer_queue.wire.messages import ENCODER, Envelope, Failure, Kind

if TYPE_CHECKING:
    from transfer_queue.runtime.access import Principal

__all__ = ["Connection", "Endpoint", "Keepalive", "fresh_buffer"]

_PING: Envelope[Any] = Envelope(Kind.PING)
_PIECE = 64 << 10
"""Of payload, encrypted at a time."""
_LONG = 8 << 20
"""Most bytes given to the socket at once. Only long headers exceed it."""
_TURN_BYTES = 4 << 20
"""After so many, a fast reader waits until the loop has served others."""
_SHORT = 4 << 10
"""Buffers up to this size are copied together, so that they share a record."""
_IN_PARTS = msgspec.Raw(b"")
_UNSENT_MESSAGES = 1024
_UNSENT_BYTES = 64 << 20
"""A peer that does not take its answers is not read from until less than half of this is left to send."""


class Endpoint(Protocol):
    """Receives what arrives over a connection. Called on the loop; must not block."""

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        """Answer with ``connection.reply`` or ``connection.fail``, now or later."""

    def on_notice(self, connection: Connection, body: Any) -> None: ...

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        """Return the buffer for a request's payload; None: a fresh one. Raise a TransferQueueError to refuse it
        unread."""

    def on_lost(self, connection: Connection) -> None: ...


class Keepalive:
    """Pings quiet connections and aborts silent ones: one timer for all connections of a process.

    A peer hears something at least every 1.25 ``heartbeat_s``.
    """

    def __init__(self, heartbeat_s: float, timeout_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.timeout_s = timeout_s
        self._connections: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0

    def add(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._last_tick = loop.time()
            self._timer = loop.call_later(self.heartbeat_s, self._tick, loop)

    def remove(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        # A process that was itself stopped must read what waits in its sockets before it may blame its peers.
        stalled = now - self._last_tick > 2 * self.heartbeat_s
        self._last_tick = now
        for connection in list(self._connections):
            if not stalled and now - connection.last_received > self.timeout_s:
                connection.abort(f"no sign of life for {self.timeout_s:g} s")
            elif now - connection.last_sent >= self.heartbeat_s / 4:  # its silence until the next tick counts too
                connection.ping()
        if self._connections:
            self._timer = loop.call_later(self.heartbeat_s, self._tick, loop)
        else:
            self._timer = None


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[tuple[Any, memoryview | None]]
    into: Callable[[int], memoryview] | None
    late: Callable[[Any], None] | None
    what: str
    deadline: float
    timeout_s: float


class Connection(asyncio.BufferedProtocol):
    """Either end of a connection. ``peer`` names the other end in errors, for example ``controller 10.0.0.1:50060``."""

    def __init__(
        self,
        endpoint: Endpoint,
        decoder: msgspec.msgpack.Decoder[Any],
        keepalive: Keepalive,
        *,
        peer: str = "client",
        limits: Limits = DEFAULT_LIMITS,
        in_all: Unsent | None = None,
    ) -> None:
        """``in_all``: this end answers requests, and takes no more of them while too many answers are unsent, its own
        or those of all connections that share this."""
        self.peer = peer
        self.welcome: Any = None
        self.context: Any = None
        """What the endpoint keeps with this connection."""
        self.principal: Principal | None = None
        """Who the peer is, if that was asked."""
        self.closed = False
        self.fault: ProtocolError | None = None
        """The invalid bytes of the peer for which this end closed the connection."""
        self.last_received = self.last_sent = 0.0
        self._endpoint = endpoint
        self._keepalive = keepalive
        self._reader = MessageReader(decoder, self._choose, limits)
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_at = math.inf
        self._queue: deque[tuple[MessageWriter, Callable[[], None] | None]] = deque()
        self._in_all = in_all
        self._made_bytes = 0  # this connection's part of that
        self._unsent_bytes = 0  # bytes of the queue
        self._owed_bytes = 0  # estimated bytes of answers in progress
        self._reading_paused = False
        self._held: Iterator[Incoming] | None = None  # messages received before reading was paused
        self._room: list[asyncio.Future[None]] = []  # wait until the peer has read its answers
        self._handed_over: list[Callable[[], None]] = []  # run once the socket took everything
        self._paused = False
        self._encrypted = False
        self._pieces: deque[Buffer] = deque()  # of frames on their way into TLS; empty unless it is paused
        self._corked = False
        self._pump_due = False
        self._reason = "it closed the connection"
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)

    # ------------------------------------------------------------------------------------------------- requests out

    async def request(
        self,
        message: Any,
        payload: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Callable[[int], memoryview] | None = None,
        late: Callable[[Any], None] | None = None,
        request_id: int | None = None,
        floor: int = 0,
    ) -> tuple[Any, memoryview | None]:
        """Send a request and wait for (reply, payload).

        ``payload`` must stay unchanged until then. ``into(nbytes)`` gives the buffer for the reply's payload.
        ``late`` gets the reply if the caller has given up before it came.
        ``request_id``: the id of an earlier try of the same request on another connection.
        Raises what the peer raised, InvalidInputError for a message that cannot be sent, ConnectionLostError,
        WaitTimeoutError.
        """
        if self.closed:
            raise self.lost_error()
        if request_id is None:
            request_id, self._next_id = self._next_id, self._next_id + 1
        envelope = Envelope(Kind.REQUEST, request_id, 0, message, floor)
        writer = MessageWriter(ENCODER, envelope, payload, DEFAULT_LIMITS.header)
        deadline = self._loop.time() + timeout_s
        pending = _Pending(self._loop.create_future(), into, late, type(message).__name__, deadline, timeout_s)
        self._pending[request_id] = pending
        self._expire_at(deadline)
        try:
            self._enqueue(writer)
            return await pending.future
        except asyncio.CancelledError:
            future = pending.future
            if late is not None and future.done() and not future.cancelled() and future.exception() is None:
                late(future.result()[0])
            raise
        finally:
            if late is None and self._pending.pop(request_id, None) is not None:
                self._reader.forget(Kind.REPLY, request_id)

    def send(self, message: Any) -> None:
        """Send a notice. A closed connection drops it."""
        if not self.closed:
            self._enqueue(MessageWriter(ENCODER, Envelope(Kind.NOTICE, 0, 0, message)))

    def ping(self) -> None:
        if not self.closed and not self._paused:
            self._enqueue(MessageWriter(ENCODER, _PING))

    # --------------------------------------------------------------------------------------------------- answers out

    def reply(
        self, request: int, body: Any, payload: Sequence[Buffer] = (), sent: Callable[[], None] | None = None
    ) -> None:
        """Answer a request. ``sent`` runs once the payload buffers are no longer needed, also if the peer is gone."""
        if self.closed:
            if sent is not None:
                sent()
            return
        self._enqueue(MessageWriter(ENCODER, Envelope(Kind.REPLY, request, 0, body), payload), sent)

    def reply_parts(self, request: int, parts: Sequence[bytes]) -> None:
        """Answer a request with a body that is given in msgpack, in parts that are not copied."""
        if not self.closed:
            self._enqueue(MessageWriter(ENCODER, Envelope(Kind.REPLY, request, 0, _IN_PARTS), value=parts))

    def owe(self, nbytes: int) -> None:
        """Add the estimated bytes of answers in progress, or remove them (negative). They count as unsent."""
        self._owed_bytes += nbytes
        self._count_made(nbytes)
        self.last_received = self._loop.time()  # the peer's messages may stay unread meanwhile
        self._bound_unsent()

    async def room(self) -> None:
        """Wait until the peer has read enough answers for more to be made, or has gone."""
        while not self.closed and (self._unsent_bytes > _UNSENT_BYTES // 2 or self._must_wait()):
            waiting = self._loop.create_future()
            self._room.append(waiting)
            await waiting

    def fail(self, request: int, error: BaseException) -> None:
        """Answer a request with an error."""
        self.reply(request, Failure.of(error))

    def close(self) -> None:
        """Close; pending requests fail, notices that were sent still go out. Idempotent."""
        if self._queue and not self.closed:
            self._pump()
        self.abort("closed by this process")

    def abort(self, reason: str) -> None:
        if not self.closed:
            self._reason = reason
            self._transport.abort()
            self.connection_lost(None)

    def handshake_failed(self) -> None:
        """Free this object at once after a failed TLS handshake, before cycles are collected. Idempotent."""
        if self._transport is None:
            self._reader.close()

    def finish(self) -> None:
        """Close after what was already answered has been sent."""
        if not self.closed:
            self._pump()  # also what is held back while messages are read
            self._transport.close()

    def trust(self, limits: Limits) -> None:
        """Admit the peer: set what it may send from its next message on."""
        self._reader.limits = limits

    @property
    def remote(self) -> str:
        """host:port of the peer, for logs; empty if unknown."""
        found = self._transport.get_extra_info("peername") if self._transport is not None else None
        return join_address(*found[:2]) if isinstance(found, tuple) else ""

    @property
    def local_host(self) -> str:
        """The address of this end; empty if unknown."""
        found = None if self.closed else self._transport.get_extra_info("sockname")
        return str(found[0]) if isinstance(found, tuple) else ""

    def fileno(self) -> int:
        """The socket's descriptor; -1 without one."""
        found = None if self.closed else self._transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def peer_certificate(self) -> dict[str, Any]:
        """The verified certificate of the peer as ``ssl`` describes it; empty if it showed none."""
        return self._transport.get_extra_info("peercert") or {}

    def peer_authorities(self) -> frozenset[bytes]:
        """The chain by which the certificate of the peer was verified, DER; empty if it showed none."""
        shown = self._transport.get_extra_info("ssl_object")
        if shown is None or not self.peer_certificate():
            return frozenset()
        if sys.version_info >= (3, 13):
            return frozenset(shown.get_verified_chain())
        chain = shown._sslobj.get_verified_chain()  # public from Python 3.13 on
        return frozenset(ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain)

    def lost_error(self) -> ConnectionLostError:
        return ConnectionLostError(f"lost the connection to {self.peer}: {self._reason}")

    # ---------------------------------------------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Zero: "resume" then means that the socket took every byte, so that buffers may be reused.
        # A TLS transport compares with >=, and its buffer holds copies.
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=1 if self._encrypted else 0, low=0)
        self.last_received = self.last_sent = self._loop.time()
        self._keepalive.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_received = self._loop.time()
        self._take(self._reader.received(nbytes))

    def _take(self, messages: Iterator[Incoming]) -> None:
        """Handle received messages until too many answers are unsent."""
        self._corked = True  # answers to all messages read at once leave together
        try:
            for incoming in messages:
                if self.closed:  # by an earlier message
                    return
                self._dispatch(incoming)
                if self._in_all is not None and self._share > 1.0:
                    self._pump()
                    self._bound_unsent()
                    if self._reading_paused and not self.closed:
                        self._held = messages
                        self._reader.hold()
                        return
        except ProtocolError as error:
            self.fault = error
            self.abort(str(error))
            return
        finally:
            self._corked = False
        if self._queue:
            self._pump()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._reading_paused:
            self.last_received = self._loop.time()  # it takes what it is sent: a sign of life
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        if exc is not None:
            self._reason = str(exc)
        self._keepalive.remove(self)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._reader.close()
        pending, self._pending = self._pending, {}
        for item in pending.values():
            if not item.future.done():
                item.future.set_exception(self.lost_error())
        sent = self._handed_over + [callback for _, callback in self._queue if callback is not None]
        self._queue.clear()
        self._count_made(self._owed_bytes - self._made_bytes)
        self._pieces.clear()
        self._held = None
        self._wake_room()
        self._handed_over = []
        for callback in sent:
            callback()
        self._endpoint.on_lost(self)

    # ------------------------------------------------------------------------------------------------------ internals

    def _choose(self, envelope: Envelope[Any], nbytes: int) -> memoryview | None:
        if envelope.kind == Kind.REPLY:
            pending = self._pending.get(envelope.id)
            if pending is None:
                return None  # timed out meanwhile
            return fresh_buffer(nbytes) if pending.into is None else pending.into(nbytes)
        if envelope.kind != Kind.REQUEST:
            raise ProtocolError("only requests and replies carry payload")
        target = self._endpoint.receive_buffer(self, envelope.body, nbytes)
        return fresh_buffer(nbytes) if target is None else target

    def _dispatch(self, incoming: Incoming) -> None:
        envelope = incoming.envelope
        if envelope.kind == Kind.REPLY:
            pending = self._pending.pop(envelope.id, None)
            if pending is None:
                return
            if pending.future.done():
                if pending.late is not None and not isinstance(envelope.body, Failure) and incoming.refused is None:
                    pending.late(envelope.body)
            elif incoming.refused is not None:
                pending.future.set_exception(incoming.refused)
            elif isinstance(envelope.body, Failure):
                pending.future.set_exception(envelope.body.exception())
            else:
                pending.future.set_result((envelope.body, incoming.target))
        elif envelope.kind == Kind.REQUEST:
            if incoming.refused is not None:
                self.fail(envelope.id, incoming.refused)
                if self.context is None and self._in_all is not None:  # not admitted: no second attempt
                    self.finish()
            else:
                self._endpoint.on_request(self, envelope.id, envelope.body, incoming.target, envelope.floor)
        elif envelope.kind == Kind.NOTICE:
            self._endpoint.on_notice(self, envelope.body)

    def _expire_at(self, deadline: float) -> None:
        """One timer for all requests, as hardly any of them expires."""
        if deadline < self._expiry_at:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_at = deadline
            self._expiry = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        now = self._loop.time()
        self._expiry, self._expiry_at = None, math.inf
        soonest = math.inf
        for pending in self._pending.values():
            if pending.future.done():
                continue
            if pending.deadline <= now:
                text = f"{self.peer} gave no answer to {pending.what} within {pending.timeout_s:g} s"
                pending.future.set_exception(WaitTimeoutError(text))
            else:
                soonest = min(soonest, pending.deadline)
        if soonest < math.inf:
            self._expire_at(soonest)

    def _enqueue(self, writer: MessageWriter, sent: Callable[[], None] | None = None) -> None:
        self._queue.append((writer, sent))
        self._unsent_bytes += writer.unsent
        self._count_made(writer.unsent_header)
        if not self._corked and not self._pump_due:
            # The first message of a turn of the loop leaves at once, those after it together: one system call.
            self._pump_due = True
            self._loop.call_soon(self._pump_rest)
            self._pump()
        if self._in_all is not None and not self._reading_paused and self._paused:
            self._bound_unsent()

    @property
    def _share(self) -> float:
        """Share of the limit of unsent answers that is in use."""
        share = max(len(self._queue) / _UNSENT_MESSAGES, (self._unsent_bytes + self._owed_bytes) / _UNSENT_BYTES)
        return share if self._in_all is None else max(share, self._made_bytes / self._in_all.allowance)

    def _must_wait(self) -> bool:
        """Whether what was made for the peer must be sent before more is made, as all peers together leave much."""
        return self._in_all is not None and self._made_bytes - self._owed_bytes > self._in_all.allowance // 2

    def _count_made(self, nbytes: int) -> None:
        self._made_bytes += nbytes
        if self._in_all is not None:
            self._in_all.nbytes += nbytes

    def _bound_unsent(self) -> None:
        if self._room and self._unsent_bytes <= _UNSENT_BYTES // 2:
            self._wake_room()
        if not self.closed and self._reading_paused != (self._share > (0.5 if self._reading_paused else 1.0)):
            self._reading_paused = not self._reading_paused
            if self._reading_paused:
                self._transport.pause_reading()
            elif self._held is None:
                self._transport.resume_reading()
            else:
                self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle the messages received before reading was paused, then read more."""
        if self._reading_paused:  # paused again
            return
        held, self._held = self._held, None
        if held is not None and not self.closed:
            self._take(held)
            if self._held is None and not self.closed and not self._reading_paused:
                self._transport.resume_reading()

    def _wake_room(self) -> None:
        room, self._room = self._room, []
        for waiting in room:
            if not waiting.done():
                waiting.set_result(None)

    def _write_pieces(self) -> None:
        for _ in range(min(len(self._pieces), _TURN_BYTES // _PIECE)):
            if self._paused:
                return
            self._transport.write(self._pieces.popleft())

    def _pump_rest(self) -> None:
        self._pump_due = False
        if (self._queue or self._pieces) and not self.closed:
            self._pump()

    def _pump(self) -> None:
        if self._transport.is_closing():  # the peer is gone, and connection_lost about to say so
            return
        self._write_pieces()
        queue, turn = self._queue, _TURN_BYTES
        while queue and not self._paused and not self._pieces and turn > 0:
            frames: list[Buffer] = []
            nbytes = 0
            while queue and nbytes < 1 << 20 and len(frames) < 256:
                writer, sent = queue.popleft()
                unsent = writer.unsent
                self._count_made(-writer.unsent_header)
                frame = writer.next_frame(ENCODER)
                self._unsent_bytes -= unsent - writer.unsent
                nbytes += sum(map(len, frame))
                frames += frame
                if not writer.done:
                    queue.append((writer, sent))  # at the end: others get their turn between the pieces
                elif sent is not None:
                    self._handed_over.append(sent)
            self.last_sent = self._loop.time()
            if self._encrypted or nbytes > _LONG:
                self._pieces += _pieces(frames)
                self._write_pieces()
            elif len(frames) == 1:
                self._transport.write(frames[0])
            else:
                self._transport.writelines(frames)
            turn -= nbytes
        if (queue or self._pieces) and not self._paused and not self._pump_due:  # others have their turn first
            self._pump_due = True
            self._loop.call_soon(self._pump_rest)
        if self._handed_over and not self._paused and not self._pieces and self._transport.get_write_buffer_size() == 0:
            callbacks, self._handed_over = self._handed_over, []
            for callback in callbacks:
                callback()
        if self._reading_paused or self._room:
            self._bound_unsent()


def _pieces(frames: Sequence[Buffer]) -> Iterator[Buffer]:
    """``frames`` as TLS takes them best: what is short in one record, what is long in pieces that stay in the cache on
    their way through the buffers of OpenSSL, and leave while the next one is encrypted."""
    short = bytearray()
    for frame in frames:
        if len(frame) <= _SHORT:
            short += frame
            continue
        if short:
            yield short
            short = bytearray()
        view = memoryview(frame)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]
    if short:
        yield short


def fresh_buffer(nbytes: int) -> memoryview:
    """Uninitialised writable bytes."""
    return np.empty(nbytes, dtype=np.uint8).data
