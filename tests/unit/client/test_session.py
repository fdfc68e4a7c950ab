"""What comes right behind the controller's Welcome, before the client has taken that up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from transfer_queue.client.session import ControllerSession
from transfer_queue.config.security import PeerSecurity
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.messages import ControllerRequest, Envelope, UnitsChanged, Welcome

Seen = list[list[UnitInfo]]
UNIT = UnitInfo(1, "unit", "127.0.0.1:1", 1 << 20)


class Controller:
    """Welcomes a client, then does ``more`` in the same moment."""

    def __init__(self, more: Callable[[Connection, int], None]) -> None:
        self.more = more
        self.welcomed = 0

    def on_request(self, connection: Connection, request: int, *_: Any) -> None:
        self.welcomed += 1
        connection.reply(request, Welcome("controller", run="r", writer=1))
        self.more(connection, self.welcomed)

    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


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
