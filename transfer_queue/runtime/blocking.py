"""A connection whose requests run in the calling thread, one at a time, on a socket of its own.

A short request that is handed to the I/O thread and back takes longer on these two ways than on the network.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from transfer_queue.config.attach import parse_address
from transfer_queue.errors import ConnectionLostError
from transfer_queue.runtime.connect import TRUSTED, shake_hands
from transfer_queue.runtime.connection import fresh_buffer
from transfer_queue.runtime.tls import Credentials
from transfer_queue.wire.frames import DEFAULT_LIMITS, Buffer, Incoming, MessageReader, MessageWriter, ProtocolError
from transfer_queue.wire.messages import ENCODER, Envelope, Failure, Hello, Kind

__all__ = ["BlockingConnection", "connect_blocking"]


class BlockingConnection:
    """Used by one thread at a time. ``peer`` names the other end in errors."""

    def __init__(self, connected: socket.socket, decoder: msgspec.msgpack.Decoder[Any], peer: str) -> None:
        self.peer = peer
        self.welcome: Any = None
        self.closed = False
        self._socket = connected
        self._reader = MessageReader(decoder, _choose, TRUSTED)
        self._next_id = 1
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    def request(
        self, message: Any, payload: Sequence[Buffer] = (), *, request_id: int | None = None, floor: int = 0
    ) -> tuple[Any, memoryview | None]:
        """Send a request and wait for (reply, payload).

        Raises what the peer raised; ConnectionLostError for a connection that broke or gave no answer within its
        timeout, and that is closed then. An exception of another kind, as KeyboardInterrupt, closes it too.
        """
        if request_id is None:
            request_id, self._next_id = self._next_id, self._next_id + 1
        envelope: Envelope[Any] = Envelope(Kind.REQUEST, request_id, 0, message, floor)
        writer = MessageWriter(ENCODER, envelope, payload, DEFAULT_LIMITS.header)
        answer: Incoming | None = None
        try:
            self._send(writer)
            while answer is None:
                answer = self._receive(request_id)
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionLostError(f"lost the connection to {self.peer}: {error}") from None
        except BaseException:
            self.close()
            raise
        if answer.refused is not None:
            raise answer.refused
        if isinstance(answer.envelope.body, Failure):
            raise answer.envelope.body.exception()
        return answer.envelope.body, answer.target

    def send(self, message: Any) -> None:
        """Send a notice, behind all requests. A broken connection drops it."""
        if not self.closed:
            try:
                self._send(MessageWriter(ENCODER, Envelope(Kind.NOTICE, 0, 0, message)))
            except OSError:
                self.close()

    def is_alive(self) -> bool:
        """Whether the server has not closed the connection. Takes the pings that came meanwhile."""
        try:
            while not self.closed and self._readable.poll(0):
                self._receive(0)
        except (OSError, ProtocolError):
            self.close()
        return not self.closed

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Idempotent; a thread that waits for an answer gets ConnectionLostError."""
        self.closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, writer: MessageWriter) -> None:
        while not writer.done:
            self._socket.sendall(b"".join(writer.next_frame(ENCODER)))

    def _receive(self, request: int) -> Incoming | None:
        """Receive once; the answer to ``request`` if that is complete. Other messages are pings, and late answers."""
        nbytes = self._socket.recv_into(self._reader.buffer())
        if nbytes == 0:
            raise ConnectionResetError("it closed the connection")
        answer = None
        for incoming in self._reader.received(nbytes):
            if incoming.envelope.kind == Kind.REPLY and incoming.envelope.id == request:
                answer = incoming
        return answer


def connect_blocking(
    address: str,
    hello: Hello,
    decoder: msgspec.msgpack.Decoder[Any],
    *,
    what: str,
    timeout_s: float,
    credentials: Credentials,
) -> BlockingConnection:
    """Connect to ``host:port`` and shake hands, as ``runtime.connect.connect`` does.

    ``timeout_s``: of each wait for bytes, from now on. Raises ConnectionLostError, and the server's refusal.
    """
    host, port = parse_address(address)
    try:
        connected = socket.create_connection((host, port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (tls := credentials.context()) is not None:
            connected = tls.wrap_socket(connected, server_hostname=credentials.server_name or host)
    except OSError as error:
        raise ConnectionLostError(f"cannot reach the {what} at {address}: {error}") from None
    connection = BlockingConnection(connected, decoder, f"{what} {address}")
    steps = shake_hands(hello, address, what, credentials)
    try:
        said = next(steps)
        while True:
            said = steps.send(connection.request(said)[0])
    except StopIteration as done:
        connection.welcome = done.value
    except BaseException:
        connection.close()
        raise
    return connection


def _choose(envelope: Envelope[Any], nbytes: int) -> memoryview | None:
    return fresh_buffer(nbytes) if envelope.kind == Kind.REPLY else None
