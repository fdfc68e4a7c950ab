"""The storage backend of a client's session, and its connections to storage units."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from transfer_queue.client.session import ControllerSession, silence
from transfer_queue.errors import RequestError, TransferQueueError
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import Backend, BackendContext, UnitInfo
from transfer_queue.storage.memory.client import MemoryBackend
from transfer_queue.storage.registry import open_backend
from transfer_queue.wire.messages import Envelope, UnitReply

__all__ = ["SessionBackend"]

_DECODER = msgspec.msgpack.Decoder(Envelope[UnitReply])
_CONNECT_S = 10.0


class SessionBackend:
    """Opens the backend that the controller names, and renews it when the session changes. Runs on the I/O loop."""

    def __init__(
        self,
        session: ControllerSession,
        client_id: str,
        run_copy: Callable[[Callable[[], Any]], Any],
        credentials: Credentials,
        keepalive: Keepalive,
    ) -> None:
        self.current: Backend | None = None
        """The backend as it was opened last, perhaps for an earlier session; None: not opened yet."""
        self.writer = 0
        """Writer number of the session for which the backend is open."""
        self.scopes: dict[int, str] = {}
        """Partitions of blocks that are being stored, for storage units that keep tenants apart."""
        self.connections: set[Connection] = set()
        self._session = session
        self._client_id = client_id
        self._run_copy = run_copy
        self._credentials = credentials
        self._keepalive = keepalive
        self._dialing: dict[str, None] = {}
        self._lock = asyncio.Lock()

    @property
    def in_memory(self) -> MemoryBackend | None:
        """The backend, if it is open and has memory that short calls reach without the I/O loop."""
        return self.current if isinstance(self.current, MemoryBackend) else None

    async def ready(self) -> Backend:
        """The backend for the current session; a new session means a new writer number, and perhaps a new run."""
        if self.current is not None and self.writer == self._session.writer:
            return self.current
        async with self._lock:
            if self.current is None or self.writer != self._session.writer:
                welcome = self._session.welcome
                context = BackendContext(
                    self._client_id,
                    welcome.writer,
                    welcome.run,
                    welcome.settings,
                    self._connect,
                    self._run_copy,
                    self._session.address,
                    self.scopes,
                )
                if self.current is None or not self._renewed(self.current, context):
                    if self.current is not None:
                        await self.current.close()
                    self.current = await self._opened(welcome.backend, context)
                self.writer = welcome.writer
        return self.current

    async def close(self) -> None:
        if self.current is not None:
            await self.current.close()

    def abandon_in_child(self) -> None:
        """Let go, after a fork, of what goes on in the parent."""
        if self.current is not None:
            self.current.abandon_in_child()

    async def discard(self, block: int, info: UnitInfo) -> None:
        """Drop a block that was stored and will not be committed."""
        if self.current is not None:
            await self.current.discard(block, info)

    def silence(self) -> str:
        """The servers that do not answer; empty if all do."""
        kind = self._session.welcome.backend
        if self._lock.locked():
            return f"the backend {kind} is being opened"
        dialed = [f"no answer from the storage unit at {address}" for address in self._dialing]
        if not dialed and not self.connections:
            return f"the backend {kind} has not answered yet"
        return ", ".join(filter(None, [*dialed, silence(self.connections)]))

    async def _opened(self, kind: str, context: BackendContext) -> Backend:
        backend = await open_backend(kind, context)
        try:
            self._session.check_open()
        except TransferQueueError:
            await backend.close()
            raise
        return backend

    def _renewed(self, backend: Backend, context: BackendContext) -> bool:
        return backend.name == self._session.welcome.backend and backend.renew(context)

    async def _connect(self, address: str) -> Connection:
        hello = self._session.hello_to_unit(self._session.writer)
        self._dialing[address] = None
        try:
            connection = await connect(
                address,
                hello,
                self,
                _DECODER,
                self._keepalive,
                what="storage unit",
                timeout_s=_CONNECT_S,
                credentials=self._credentials,
            )
        finally:
            self._dialing.pop(address, None)
        self.connections.add(connection)
        return connection

    # ------------------------------------------------------------------------------------------ Endpoint of connections

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        connection.abort("a client serves no requests")

    def on_notice(self, connection: Connection, body: Any) -> None: ...

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        raise RequestError("a client takes no payload but in replies")

    def on_lost(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.current is not None:
            self.current.release_lost()
