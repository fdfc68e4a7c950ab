"""What the controller and the storage unit share as servers: listening, the handshake, closing."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from transfer_queue.config.attach import join_address
from transfer_queue.config.security import ServerSecurity
from transfer_queue.errors import RequestError, StartError, TransferQueueError
from transfer_queue.runtime.access import Access
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import HANDSHAKE_S, listen_context
from transfer_queue.wire.frames import DEFAULT_LIMITS, Limits
from transfer_queue.wire.messages import PROTOCOL, Hello, Welcome

__all__ = ["Server", "advertised_host"]


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
        self._server: asyncio.Server | None = None
        self.connections: set[Connection] = set()
        self.address = ""
        self.access: Access | None = None
        """Set by ``listen``; None: every peer may do everything."""

    async def listen(self, host: str, port: int, advertise: str | None, security: ServerSecurity | None = None) -> None:
        """Raises StartError if the address cannot be used, ConfigError for files of ``security``."""
        loop = asyncio.get_running_loop()
        security = security or ServerSecurity()
        self.access = Access.of(security)
        if self.access is not None:
            self.access.warn_if_readable(host)
        ssl = listen_context(security)
        secured: dict[str, Any] = {"ssl": ssl, "ssl_handshake_timeout": HANDSHAKE_S} if ssl else {}
        try:
            self._server = await loop.create_server(self._make, host or None, port, backlog=4096, **secured)
        except OSError as error:
            reason = error.strerror or str(error)
            if "in use" in str(error):
                reason = "the port is in use; stop the other process or choose another port"
            raise StartError(f"cannot listen on {join_address(host, port)}: {reason}") from None
        bound = self._server.sockets[0].getsockname()[1]
        self.address = join_address(advertised_host(host, advertise), bound)

    async def close(self) -> None:
        """Stop listening and drop all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.close()

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
            if self.access is not None:
                connection.principal = self.access.admit(connection, body)
            reply = self.welcome(connection, body)
        except TransferQueueError as error:
            connection.fail(request, error)
            connection.finish()
            return
        self.connections.add(connection)
        connection.peer = f"{body.role} {body.client_id}"
        connection.reply(request, reply)

    def on_notice(self, connection: Connection, body: Any) -> None:
        if connection.context is None:
            connection.abort("a connection begins with Hello")
        else:
            self.notice(connection, body)

    def on_lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if connection.context is not None:
            self.gone(connection)

    def _make(self) -> Connection:
        return Connection(self, self._decoder, self._keepalive, limits=self._limits, bounded=True)
