"""A controller of a test's own behind a real socket: what it answers, and when, is up to the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.wire.messages import ControllerRequest, Envelope

_DECODER = msgspec.msgpack.Decoder(Envelope[ControllerRequest])


@asynccontextmanager
async def serving(controller: Any) -> AsyncIterator[tuple[str, list[Connection]]]:
    """Address of ``controller``, an Endpoint, and its ends of the connections that were made to it."""
    connections: list[Connection] = []
    keepalive = Keepalive(60.0, 60.0)

    def connection() -> Connection:
        connections.append(Connection(controller, _DECODER, keepalive))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()
