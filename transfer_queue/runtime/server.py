"""What the controller and the storage unit share as servers: listening, the handshake, closing."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from transfer_queue.config.attach import join_address
from transfer_queue.config.security import ServerSecurity
from transfer_queue.errors import NotAuthorizedError, RequestError, StartError, TransferQueueError
from transfer_queue.runtime.access import Access
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.gate import Gate, Refusals, Stranger
from transfer_queue.runtime.tls import HANDSHAKE_S, listen_context
from transfer_queue.runtime.unsent import Unsent
from transfer_queue.wire.frames import DEFAULT_LIMITS, STRANGER_LIMITS, Limits
from transfer_queue.wire.messages import PROTOCOL, Challenge, Hello, Welcome

__all__ = ["Server", "advertised_host"]

_STRANGERS, _STRANGERS_OF_ADDRESS = 1024, 512
"""Most connections without a complete Hello, in total and from one address; half of it with TLS, where each takes 50
KB."""


def advertised_host(host: str, advertise: str | None) -> str:
    """The host name that others reach a listener on ``host`` by."""
    if advertise:
        return advertise
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host


class Server:
    """Listens, admits peers by their Hello, and passes their messages to the methods that subclasses fill in."""

    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Any], keepalive: Keepalive, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._decoder = decoder
        self._keepalive = keepalive
        self._limits = limits
        self._gate: Gate | None = None
        self._secured: dict[str, Any] = {}
        self._strangers: dict[Connection, Stranger] = {}
        self._unsent = Unsent()
        self.refusals = Refusals()
        self.connections: set[Connection] = set()
        self._rechecking: asyncio.TimerHandle | None = None
        self.address = ""
        self.access: Access | None = None
        """Set by ``listen``; None: every peer may do everything."""

    async def listen(self, host: str, port: int, advertise: str | None, security: ServerSecurity | None = None) -> None:
        """Raises StartError if the address cannot be used, ConfigError for files of ``security``."""
        security = security or ServerSecurity()
        self.access = Access.of(security)
        if self.access is not None:
            self.access.warn_if_readable(host)
        ssl = listen_context(security)
        self._secured = {"ssl": ssl, "ssl_handshake_timeout": HANDSHAKE_S} if ssl else {}
        gate = Gate(
            self._open,
            self.refusals,
            patience_s=HANDSHAKE_S,
            per_address=_STRANGERS_OF_ADDRESS // (2 if ssl else 1),
            total=_STRANGERS // (2 if ssl else 1),
        )
        try:
            bound = gate.listen(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            if "in use" in str(error):
                reason = "the port is in use; stop the other process or choose another port"
            raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from None
        self._gate = gate
        self.address = join_address(advertised_host(host, advertise), bound)
        if self.access is not None:
            self.access.port = bound
            self._recheck()

    def _recheck(self) -> None:
        """Cut off peers whose authority, token or entry in the policy was removed since they were admitted."""
        self._rechecking = asyncio.get_running_loop().call_later(self._keepalive.heartbeat_s, self._recheck)
        if self.access is None or not self.access.changed():
            return
        for connection in list(self.connections):
            if reason := self.access.objection(connection):
                self.refusals.note("credentials", connection.remote, f"{connection.peer} is cut off: {reason}")
                connection.abort(reason)

    async def close(self) -> None:
        """Stop listening and drop all connections. Idempotent."""
        if self._rechecking is not None:
            self._rechecking.cancel()
        if self._gate is not None:
            self._gate.close()
        for connection in list(self.connections):
            connection.close()

    @property
    def pending(self) -> int:
        """Connections that are not admitted yet."""
        return len(self._strangers)

    def descriptors(self) -> list[int]:
        """Sockets that a forked child must close."""
        connections = (*self.connections, *self._strangers)
        listeners = [] if self._gate is None else self._gate.descriptors()
        return [*listeners, *(number for each in connections if (number := each.fileno()) >= 0)]

    # -------------------------------------------------------------------------------------- for subclasses to fill in

    def welcome(self, connection: Connection, hello: Hello) -> Welcome:
        """Admit a peer: set ``connection.context``, return the answer. Raise a TransferQueueError to refuse."""
        raise NotImplementedError

    def serve(self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int) -> None:
        raise NotImplementedError

    def notice(self, connection: Connection, body: Any) -> None:
        raise NotImplementedError

    def gone(self, connection: Connection) -> None:
        """An admitted peer disconnected."""
        raise NotImplementedError

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        raise RequestError(f"{type(body).__name__} takes no payload")

    # ------------------------------------------------------------------------------------------------------- Endpoint

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        if connection.context is not None and not isinstance(body, Hello):
            self.serve(connection, request, body, payload, floor)
            return
        try:
            if not isinstance(body, Hello) or connection.context is not None:
                raise RequestError("a connection begins with exactly one Hello")
            if body.protocol != PROTOCOL:
                raise RequestError(
                    f"this server speaks protocol {PROTOCOL}, the peer {body.protocol}; install one version on both"
                )
            if self.access is not None and (nonce := self.access.challenge(connection)):
                connection.reply(request, Challenge(nonce))
                return
            if self.access is not None:
                connection.principal = self.access.admit(connection, body)
            reply = self.welcome(connection, body)
            if self.access is not None:
                reply = self.access.answer(body, reply)
        except TransferQueueError as error:
            if isinstance(error, NotAuthorizedError):
                self.refusals.note("credentials", connection.remote, str(error))
            connection.fail(request, error)
            connection.finish()
            return
        self._no_stranger(connection)
        connection.trust(self._limits)
        self.connections.add(connection)
        connection.peer = f"{body.role} {body.client_id}"
        connection.reply(request, reply)

    def on_notice(self, connection: Connection, body: Any) -> None:
        if connection.context is None:
            connection.abort("a connection begins with Hello")
        else:
            self.notice(connection, body)

    def on_lost(self, connection: Connection) -> None:
        if connection.fault is not None:
            who = "" if connection.context is None else f"{connection.peer}: "
            self.refusals.note("malformed", connection.remote, f"{who}{connection.fault}")
        self._no_stranger(connection)
        self.connections.discard(connection)
        if connection.context is not None:
            self.gone(connection)

    async def _open(self, accepted: socket.socket, stranger: Stranger) -> None:
        """Make a connection of an accepted socket; with TLS after the handshake."""
        connection = Connection(self, self._decoder, self._keepalive, limits=STRANGER_LIMITS, in_all=self._unsent)
        self._strangers[connection] = stranger
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, **self._secured)
        except OSError as error:
            if self._secured and not isinstance(error, ConnectionResetError | BrokenPipeError):
                self.refusals.note("tls", stranger.address, f"the TLS handshake failed: {error}")
            self._no_stranger(connection)
            connection.handshake_failed()
        except asyncio.CancelledError:
            self._no_stranger(connection)
            connection.handshake_failed()
            raise
        if connection in self._strangers:
            stranger.drop = connection.abort

    def _no_stranger(self, connection: Connection) -> None:
        if (stranger := self._strangers.pop(connection, None)) is not None and self._gate is not None:
            self._gate.leave(stranger)
