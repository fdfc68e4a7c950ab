"""A client's session: what comes right behind the controller's Welcome, and its end at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.controllers import serving
from tests.waiting import until
from transfer_queue.client.session import ControllerSession
from transfer_queue.config.security import PeerSecurity
from transfer_queue.config.trouble import Trouble, write_trouble
from transfer_queue.control.commands import Fetch, ListPartitions, Value
from transfer_queue.errors import ConnectionLostError, NotInitializedError, WaitTimeoutError
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.messages import Announce, Look, UnitsChanged, Welcome

Seen = list[list[UnitInfo]]
UNIT = UnitInfo(1, "unit", "127.0.0.1:1", 1 << 20)


class Controller:
    """Welcomes a client, then does ``more`` in the same moment."""

    def __init__(self, more: Callable[[Connection, int], None] = lambda connection, number: None) -> None:
        self.more = more
        self.welcomed = 0
        self.held = self.fetches = 0
        self.announced: dict[Connection, list[int]] = {}

    def on_request(self, connection: Connection, request: int, body: Any, *_: Any) -> None:
        if isinstance(body, Look):
            connection.reply(request, Value("a look"))
        elif isinstance(body, ListPartitions | Fetch):
            self.held = request
            self.fetches += isinstance(body, Fetch)
        else:
            self.welcomed += 1
            connection.reply(request, Welcome("controller", name="q", run="r", writer=1))
            self.more(connection, self.welcomed)

    def on_notice(self, connection: Connection, body: Any) -> None:
        if isinstance(body, Announce):
            self.announced.setdefault(connection, []).append(body.block)

    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


def unheard(units: list[UnitInfo]) -> None: ...


@asynccontextmanager
async def attaching(
    controller: Controller, changed: Callable[[list[UnitInfo]], None] = unheard
) -> AsyncIterator[tuple[ControllerSession, list[Connection]]]:
    """A session, and the controller's ends of its connections."""
    async with serving(controller) as (address, connections):
        session = ControllerSession([address], "c", Keepalive(2.0, 60.0), changed, Credentials(PeerSecurity()))
        try:
            yield session, connections
        finally:
            session.close()


async def units_seen(more: Callable[[Connection, int], None], enough: Callable[[Seen, Controller], bool]) -> Seen:
    controller = Controller(more)
    seen: Seen = []
    async with attaching(controller, seen.append) as (session, _):
        await session.open(10.0)
        await until(lambda: enough(seen, controller))
    return seen


async def test_news_of_units_right_behind_the_welcome_are_not_lost() -> None:
    def tell(connection: Connection, _: int) -> None:
        connection.send(UnitsChanged([UNIT]))

    assert (await units_seen(tell, lambda seen, _: bool(seen)))[-1] == [UNIT]


async def test_a_connection_that_ends_right_behind_the_welcome_is_made_anew() -> None:
    def end_the_first(connection: Connection, number: int) -> None:
        if number == 1:
            connection.finish()

    await units_seen(end_the_first, lambda _, controller: controller.welcomed > 1)


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
    session = ControllerSession(["127.0.0.1:1"], "c", Keepalive(2.0, 60.0), unheard, Credentials(PeerSecurity()))
    session.start()
    waiting = asyncio.ensure_future(session.request(ListPartitions(""), 60.0))
    await asyncio.sleep(0)
    session.close()
    with pytest.raises(NotInitializedError, match="is closed"):
        await asyncio.wait_for(waiting, 5.0)


async def test_a_fetch_that_was_given_up_while_its_answer_was_on_the_way_is_asked_for_again() -> None:
    rows = Fetch("p", ["x"], 1, "t", timeout_s=0.2)
    controller = Controller()
    async with attaching(controller) as (session, connections):
        await session.open(10.0)
        first = asyncio.ensure_future(session.request(rows, 60.0, 0.2))
        await until(lambda: controller.fetches == 1)
        address, session._addresses = session._addresses, ["127.0.0.1:1"]
        connections[0].close()
        with pytest.raises(WaitTimeoutError, match=r"no answer within 0.2 s: .*127.0.0.1:1"):
            await first
        lost = controller.held
        session._addresses = address
        other = asyncio.ensure_future(session.request(Fetch("p", ["y"], 1, "t"), 60.0))
        await until(lambda: controller.fetches == 2)
        assert controller.held != lost
        again = asyncio.ensure_future(session.request(msgspec.structs.replace(rows, timeout_s=0.0), 60.0))
        await until(lambda: controller.fetches == 3)
        assert controller.held == lost
        for waiting in (other, again):
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        assert not session._pending


async def test_attaching_that_is_given_up_ends() -> None:
    session = ControllerSession(["127.0.0.1:1"], "c", Keepalive(2.0, 60.0), unheard, Credentials(PeerSecurity()))
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


async def test_blocks_are_announced_again_over_a_new_connection_until_they_are_settled() -> None:
    controller = Controller()
    async with attaching(controller) as (session, connections):
        await session.open(10.0)
        session.announce(1, 7)
        session.announce(1, 8)
        await until(lambda: controller.announced.get(connections[0]) == [7, 8])
        connections[0].abort("the network failed")
        await until(lambda: not session.connections())
        session.announce(1, 9)
        session.settled(8)
        await until(lambda: len(connections) == 2 and controller.announced.get(connections[1]) == [7, 9])


async def test_a_request_that_waited_for_a_connection_waits_for_its_answer_only_as_long_as_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed: list[float] = []
    request = Connection.request

    async def noted(self: Connection, message: Any, *arguments: Any, timeout_s: float, **more: Any) -> Any:
        if isinstance(message, Look):
            allowed.append(timeout_s)
        return await request(self, message, *arguments, timeout_s=timeout_s, **more)

    monkeypatch.setattr(Connection, "request", noted)
    async with attaching(Controller()) as (session, _):
        session.start()
        await session.transfer(Look(), (), 60.0)
    assert 0 < allowed[0] < 60.0


async def test_a_request_ends_once_its_own_queue_is_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def note(queue: str, *more: Any) -> None:
        folder = tmp_path / "transferqueue" / queue
        folder.mkdir(parents=True, exist_ok=True)
        write_trouble(folder, Trouble(queue, [address], *more))

    async with serving(Controller()) as (address, connections):
        session = ControllerSession([address], "c", Keepalive(2.0, 60.0), unheard, Credentials(PeerSecurity()))
        await session.open(10.0)
    note("another", "it was taken down", "down")
    waiting = asyncio.create_task(session.request(ListPartitions(""), 100.0))
    connections[0].abort("gone")
    await until(lambda: "cannot reach" in str(session.lost()))
    assert "another" not in str(session.lost())
    note("q", "its controller is being restarted")
    assert str(session.lost()).count("restarted") == 1
    assert (waiting.done(), session.ended) == (False, "")
    note("q", "it was taken down", "down")
    with pytest.raises(ConnectionLostError, match="queue q ended: it was taken down"):
        await asyncio.wait_for(waiting, 60)
    session.close()
