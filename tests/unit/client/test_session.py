"""A client's session: what comes right behind the controller's Welcome, and its end at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from transfer_queue.client.session import ControllerSession
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.commands import ListPartitions, Value
from transfer_queue.errors import NotInitializedError
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.messages import ControllerRequest, Envelope, Look, UnitsChanged, Welcome

Seen = list[list[UnitInfo]]
UNIT = UnitInfo(1, "unit", "127.0.0.1:1", 1 << 20)


class Controller:
    """Welcomes a client, then does ``more`` in the same moment."""

    def __init__(self, more: Callable[[Connection, int], None] = lambda connection, number: None) -> None:
        self.more = more
        self.welcomed = 0
        self.held = 0

    def on_request(self, connection: Connection, request: int, body: Any, *_: Any) -> None:
        if isinstance(body, Look):
            connection.reply(request, Value("a look"))
        elif isinstance(body, ListPartitions):
            self.held = request
        else:
            self.welcomed += 1
            connection.reply(request, Welcome("controller", run="r", writer=1))
            self.more(connection, self.welcomed)

    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


@asynccontextmanager
async def attaching(controller: Controller) -> AsyncIterator[tuple[ControllerSession, list[Connection]]]:
    """A session, and the controller's ends of its connections."""
    connections: list[Connection] = []
    keepalive = Keepalive(2.0, 60.0)
    decoder = msgspec.msgpack.Decoder(Envelope[ControllerRequest])

    def connection() -> Connection:
        connections.append(Connection(controller, decoder, keepalive))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    session = ControllerSession([address], "c", keepalive, lambda units: None, Credentials(PeerSecurity()))
    try:
        yield session, connections
    finally:
        session.close()
        server.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def units_seen(more: Callable[[Connection, int], None], until: Callable[[Seen, Controller], bool]) -> Seen:
    async def run() -> Seen:
        controller = Controller(more)
        seen: Seen = []
        keepalive = Keepalive(2.0, 60.0)
        decoder = msgspec.msgpack.Decoder(Envelope[ControllerRequest])
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(controller, decoder, keepalive), "127.0.0.1", 0
        )
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        session = ControllerSession([address], "c", keepalive, seen.append, Credentials(PeerSecurity()))
        try:
            await session.open(10.0)
            deadline = time.monotonic() + 10.0
            while not until(seen, controller):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            return seen
        finally:
            session.close()
            server.close()

    return asyncio.run(run())


def test_news_of_units_right_behind_the_welcome_are_not_lost() -> None:
    def tell(connection: Connection, _: int) -> None:
        connection.send(UnitsChanged([UNIT]))

    assert units_seen(tell, lambda seen, _: bool(seen))[-1] == [UNIT]


def test_a_connection_that_ends_right_behind_the_welcome_is_made_anew() -> None:
    def end_the_first(connection: Connection, number: int) -> None:
        if number == 1:
            connection.finish()

    units_seen(end_the_first, lambda _, controller: controller.welcomed > 1)


@pytest.mark.parametrize("turns", range(20))
async def test_a_session_that_is_closed_while_it_connects_keeps_no_connection(turns: int) -> None:
    async with attaching(Controller()) as (session, connections):
        session.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        session.close()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not session.connections()
        assert all(connection.closed for connection in connections)


async def test_the_end_of_a_session_reaches_what_waits_for_a_connection() -> None:
    session = ControllerSession(
        ["127.0.0.1:1"], "c", Keepalive(2.0, 60.0), lambda units: None, Credentials(PeerSecurity())
    )
    session.start()
    waiting = asyncio.ensure_future(session.request(ListPartitions(""), 60.0))
    await asyncio.sleep(0)
    session.close()
    with pytest.raises(NotInitializedError, match="is closed"):
        await asyncio.wait_for(waiting, 5.0)


async def test_attaching_that_is_given_up_ends() -> None:
    session = ControllerSession(
        ["127.0.0.1:1"], "c", Keepalive(2.0, 60.0), lambda units: None, Credentials(PeerSecurity())
    )
    opening = asyncio.ensure_future(session.open(60.0))
    await asyncio.sleep(0)
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_no_number_of_requests_that_are_sent_once_takes_the_one_of_another() -> None:
    controller = Controller()
    async with attaching(controller) as (session, connections):
        session.start()
        waiting = asyncio.ensure_future(session.request(ListPartitions(""), 60.0))
        await until(lambda: controller.held > 0)
        for _ in range(1000):
            await session.transfer(Look(), (), 10.0)
        connections[0].reply(controller.held, Value(["a partition"]))
        assert await asyncio.wait_for(waiting, 5.0) == Value(["a partition"])
