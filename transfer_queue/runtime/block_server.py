"""The server of a storage unit: passes the requests of clients to the unit's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import msgspec

from transfer_queue.errors import RequestError, TransferQueueError
from transfer_queue.runtime.access import GuardedStore
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.counters import UnitCounters
from transfer_queue.runtime.server import Server
from transfer_queue.storage.base import Served, ServingStore
from transfer_queue.wire.messages import (
    Envelope,
    Hello,
    UnitRequest,
    Welcome,
)

__all__ = ["BlockServer"]

log = logging.getLogger(__name__)

_CLIENTS = msgspec.msgpack.Decoder(Envelope[UnitRequest])


class _ClientPeer:
    """A client's connection as the store sees it."""

    def __init__(self, hello: Hello) -> None:
        self.client_id = hello.client_id
        self.writer = hello.writer


class BlockServer(Server):
    """Passes clients' requests to a store that serves them."""

    def __init__(self, store: ServingStore, keepalive: Keepalive, report_orphans: Callable[[list[int]], None]) -> None:
        super().__init__(_CLIENTS, keepalive)
        self._store = store
        self._report_orphans = report_orphans
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters = UnitCounters()

    def welcome(self, connection: Connection, hello: Hello) -> Welcome:
        peer = _ClientPeer(hello)
        if isinstance(self._store, GuardedStore):
            assert connection.principal is not None
            self._store.admit(hello, connection.principal)
            attributes = self._store.connected_as(peer, connection.principal)
        else:
            attributes = self._store.connected(peer)
        connection.context = peer
        return Welcome("unit", attributes=attributes)

    def serve(self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int) -> None:
        started = perf_counter()
        try:
            answer = self._store.serve(connection.context, body, payload)
        except TransferQueueError as error:
            self._fail(connection, request, body, started, error)
        except MemoryError:
            raise  # ends the process
        except Exception as error:  # boundary of a request: the caller gets it, the unit goes on
            log.exception("request %s failed", type(body).__name__)
            failure = RequestError(f"{type(error).__name__} in the storage unit: {error}")
            self._fail(connection, request, body, started, failure)
        else:
            if isinstance(answer, Served):
                self._reply(connection, request, body, started, answer)
            else:
                task = asyncio.get_running_loop().create_task(
                    self._serve_later(connection, request, body, started, answer)
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve_later(
        self, connection: Connection, request: int, body: Any, started: float, work: Coroutine[Any, Any, Served]
    ) -> None:
        try:
            answer = await work
        except TransferQueueError as error:
            self._fail(connection, request, body, started, error)
        except MemoryError:
            raise
        except Exception as error:  # boundary of a request
            log.exception("request failed")
            failure = RequestError(f"{type(error).__name__} in the storage unit: {error}")
            self._fail(connection, request, body, started, failure)
        else:
            self._reply(connection, request, body, started, answer)

    def _reply(self, connection: Connection, request: int, body: Any, started: float, answer: Served) -> None:
        connection.reply(request, answer.reply, answer.payload, answer.sent)
        self.counters.served(body, perf_counter() - started, answer.reply, answer.payload)

    def _fail(self, connection: Connection, request: int, body: Any, started: float, error: Exception) -> None:
        connection.fail(request, error)
        self.counters.requests.count(type(body), perf_counter() - started, True)

    def notice(self, connection: Connection, body: Any) -> None:
        self._store.notice(connection.context, body)

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        if connection.context is None:
            raise RequestError("a connection begins with Hello")
        self.counters.received(body, nbytes)
        return self._store.receive_buffer(connection.context, body, nbytes)

    def gone(self, connection: Connection) -> None:
        orphans = self._store.disconnected(connection.context)
        if orphans:
            self._report_orphans(orphans)
