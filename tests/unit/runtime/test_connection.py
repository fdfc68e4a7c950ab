"""Connections that end: over what a peer says, and because there is no such peer."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest

from transfer_queue.errors import ConnectionLostError
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.wire.messages import Announce, ControllerRequest, Envelope, Hello

DECODER = msgspec.msgpack.Decoder(Envelope[ControllerRequest])


class Strict:
    """Closes a connection with its first notice."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ended = asyncio.Event()

    def on_notice(self, connection: Connection, body: Any) -> None:
        self.events.append(type(body).__name__)
        connection.abort("no more of these")

    def on_lost(self, connection: Connection) -> None:
        self.events.append("lost")
        self.ended.set()

    def on_request(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


async def test_a_closed_connection_passes_on_nothing() -> None:
    strict, keepalive = Strict(), Keepalive(60.0, 60.0)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(strict, DECODER, keepalive), "127.0.0.1", 0)
    _, client = await loop.create_connection(
        lambda: Connection(Strict(), DECODER, keepalive), *server.sockets[0].getsockname()
    )
    for block in range(3):
        client.send(Announce(1, block))
    await strict.ended.wait()
    await asyncio.sleep(0)
    assert strict.events == ["Announce", "lost"]
    client.close()
    server.close()


async def test_what_cannot_be_the_name_of_a_host_cannot_be_reached() -> None:
    with pytest.raises(ConnectionLostError, match=r"a\.\.b is no name of a host"):
        await connect(
            "a..b:1",
            Hello("client", "c"),
            Strict(),
            DECODER,
            Keepalive(60.0, 60.0),
            what="controller",
            timeout_s=5.0,
        )


class Quiet:
    """A connection over which nothing goes but pings."""

    def __init__(self, last_sent: float) -> None:
        self.last_sent = last_sent
        self.last_received = math.inf
        self.silences: list[float] = []
        self.now = 0.0

    def ping(self) -> None:
        self.silences.append(self.now - self.last_sent)
        self.last_sent = self.now


class Ticks:
    """A loop of which only the timer runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, *_: Any) -> None: ...


@pytest.mark.parametrize("sent", [-0.1, -0.3, -1.0, -1.7, -1.9])
def test_a_peer_hears_from_a_quiet_connection_in_time(sent: float) -> None:
    """Whatever the moment of the last message before the timer ran first: servers of tests wait 3 s."""
    keepalive, connection, loop = Keepalive(2.0, 10.0), Quiet(sent), Ticks()
    keepalive._connections.add(connection)  # type: ignore[arg-type]
    for tick in range(4):
        loop.now = connection.now = 2.0 * tick
        keepalive._tick(loop)  # type: ignore[arg-type]
    assert len(connection.silences) >= 3
    assert max(connection.silences) <= 2.5
