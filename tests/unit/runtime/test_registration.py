"""A storage unit's connection to its controller, and what happens while it registers or right behind that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.controllers import serving
from tests.waiting import until
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.config.security import ServerSecurity, TlsFiles
from transfer_queue.control.directory import Shard
from transfer_queue.errors import ConfigError, ConnectionLostError
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.storage_unit import ControllerLink, serve
from transfer_queue.runtime.units import pack_blocks, unpack_blocks
from transfer_queue.storage.base import UnitStats, UnitStore
from transfer_queue.wire.messages import (
    FreeBlocks,
    Hello,
    Joined,
    ReportOrphans,
    UnitReport,
    Welcome,
)


class Controller:
    """Takes a unit in as one with a journal does: ends the connection of before at once, and answers in a moment."""

    def __init__(self, frees: bool = False, shard: Shard | None = None) -> None:
        """``frees``: has the unit free a block, in the same moment in which it joined. ``shard``: which it is."""
        self.frees = frees
        self.shard = shard
        self.joining = self.joined = self.reports = 0
        self.orphans: list[int] = []
        self.incarnations: list[str] = []
        self.current: Connection | None = None

    def on_request(self, connection: Connection, request: int, body: Any, *_: Any) -> None:
        if isinstance(body, Hello):
            attributes = {} if self.shard is None else self.shard.attribute()
            connection.reply(request, Welcome("controller", run="r", attributes=attributes))
            return
        if self.current is not None:
            self.current.abort("the unit registered over another connection")
        self.current = connection
        self.incarnations.append(body.incarnation)
        self.joining += 1
        asyncio.get_running_loop().call_later(0.02, self.take_in, connection, request)

    def take_in(self, connection: Connection, request: int) -> None:
        self.joined += 1
        connection.reply(request, Joined(7, "r", b""))
        if self.frees:
            connection.send(FreeBlocks(pack_blocks([5])))

    def on_notice(self, connection: Connection, body: Any) -> None:
        self.reports += isinstance(body, UnitReport)
        if isinstance(body, ReportOrphans):
            self.orphans += unpack_blocks(body.blocks)

    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


class Store(UnitStore):
    """Fails to free blocks the first times."""

    def __init__(self, failures: int = 0, blocks: bool = False) -> None:
        """``blocks``: it fails for some only."""
        self.failures = failures
        self.blocks = blocks

    def stats(self) -> UnitStats:
        return UnitStats(1 << 20, 0, 0)

    def attributes(self) -> dict[str, Any]:
        return {}

    async def inventory(self) -> list[int]:
        return []

    async def free(self, blocks: Sequence[int]) -> None:
        if self.failures and (blocks or not self.blocks):
            self.failures -= 1
            raise ConnectionLostError("what keeps the blocks does not answer")

    async def close(self) -> None: ...


def registering(controller: Controller, store: Store, check: Callable[[ControllerLink], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(controller) as (address, _):
            config = StorageUnitConfig(name="u", host="127.0.0.1", port=0, controller=[address], capacity=1 << 20)
            link = ControllerLink(config, store, Keepalive(60.0, 60.0), [address], None, lambda: True)
            running = asyncio.create_task(link.run(asyncio.Event()))
            try:
                await check(link)
            finally:
                while not running.done():  # up to Python 3.11 wait_for may lose a cancellation
                    link.start_over()
                    running.cancel()
                    await asyncio.sleep(0)
                if controller.current is not None:
                    controller.current.close()

    asyncio.run(run())


def test_a_store_that_fails_after_the_registration_leaves_one_connection_that_reports_with_each_heartbeat() -> None:
    controller = Controller()

    async def check(link: ControllerLink) -> None:
        await until(lambda: controller.joined > 1 and controller.reports > 0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert controller.reports == 1

    registering(controller, Store(failures=1), check)


def test_a_unit_that_could_not_free_blocks_registers_again_to_be_told_once_more() -> None:
    controller = Controller(frees=True)

    async def check(link: ControllerLink) -> None:
        await until(lambda: controller.joined == 2)

    registering(controller, Store(failures=1, blocks=True), check)


@pytest.mark.parametrize("said", [None, (0, 3), (1, 2)])
def test_a_unit_keeps_away_from_a_controller_of_another_number_of_shards(said: tuple[int, int] | None) -> None:
    """It would hear which blocks are its own by another rule, and free those of other shards."""

    async def run() -> None:
        shard = None if said is None else Shard(said[0], ["a:1"] * said[1])
        controller = Controller(shard=shard)
        async with serving(controller) as (address, _):
            config = StorageUnitConfig(
                name="u", controller=[address], shards=[address, "b:1"], capacity=1 << 20, start_timeout=0.0
            )
            link = ControllerLink(config, Store(), Keepalive(60.0, 60.0), [address], 0, lambda: True)
            told = "one controller" if said is None else "shard {} of {}".format(*said)
            with pytest.raises(
                ConnectionLostError, match=f"is {told}, and this unit was started to serve shard 0 of 2"
            ):
                await asyncio.wait_for(link.run(asyncio.Event()), 10)
        assert controller.joining == 0

    asyncio.run(run())


def test_a_unit_of_one_controller_keeps_away_from_a_shard() -> None:
    async def run() -> None:
        controller = Controller(shard=Shard(0, ["a:1", "b:1"]))
        async with serving(controller) as (address, _):
            config = StorageUnitConfig(name="u", controller=[address], capacity=1 << 20, start_timeout=0.0)
            link = ControllerLink(config, Store(), Keepalive(60.0, 60.0), [address], None, lambda: True)
            with pytest.raises(ConnectionLostError, match="is shard 0 of 2, and this unit was started to serve one"):
                await asyncio.wait_for(link.run(asyncio.Event()), 10)
        assert controller.joining == 0

    asyncio.run(run())


def test_a_unit_whose_credentials_cannot_be_used_leaves_no_memory(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.pem")
    config = StorageUnitConfig(
        name="u",
        host="127.0.0.1",
        port=0,
        controller=["127.0.0.1:1"],
        capacity=1 << 20,
        directory=str(tmp_path),
        security=ServerSecurity(tls=TlsFiles(ca=absent, certificate=absent, key=absent)),
    )
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        asyncio.run(serve(config, asyncio.Event()))
    assert not list(tmp_path.iterdir())


def test_blocks_of_a_client_that_goes_while_its_unit_registers_are_reported_then() -> None:
    controller = Controller()

    async def check(link: ControllerLink) -> None:
        await until(lambda: controller.joining > 0)
        link.report_orphans([5])
        await until(lambda: controller.orphans == [5])

    registering(controller, Store(), check)


def test_a_unit_in_doubt_tells_again_what_it_holds_also_in_the_midst_of_its_registration() -> None:
    controller = Controller()

    async def check(link: ControllerLink) -> None:
        await until(lambda: controller.joining == 1)
        link.tell_again()  # the inventory is on its way
        await until(lambda: controller.joined == 2 and link.connected)
        link.tell_again()
        await until(lambda: controller.joined == 3)
        assert len(set(controller.incarnations)) == 1, "it is the same unit"

    registering(controller, Store(), check)
