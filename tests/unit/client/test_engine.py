"""What a client does with blocks and backends when puts are given up, or the client is closed, under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.unit.controllers import serving
from tests.waiting import until
from transfer_queue.client import backend as backend_module
from transfer_queue.client.engine import Engine
from transfer_queue.columns.device_memory import DeviceMemory
from transfer_queue.control.commands import Commit, Committed
from transfer_queue.errors import CapacityError, NotInitializedError
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.sessions import ClientSession
from transfer_queue.storage import base
from transfer_queue.storage.base import BlockRead, Capabilities, Fetched, StoreContext, UnitInfo
from transfer_queue.storage.conformance.blocks import block_of_bytes
from transfer_queue.storage.memory.device import DeviceStore
from transfer_queue.wire.messages import Hello, Welcome

UNIT = UnitInfo(1, "unit", "127.0.0.1:1", 1 << 20)


class Controller:
    """Welcomes, and leaves commits to the test."""

    def __init__(self, units: list[UnitInfo], backend: str = "test") -> None:
        self.units = units
        self.backend = backend
        self.commits: list[tuple[Connection, int]] = []
        self.session = ClientSession(1, "c")
        self.lost = 0

    def on_request(self, connection: Connection, request: int, body: Any, *_: Any) -> None:
        if isinstance(body, Hello):
            connection.reply(request, Welcome("controller", run="r", writer=1, backend=self.backend, units=self.units))
        else:
            self.commits.append((connection, request))

    def on_notice(self, connection: Connection, body: Any) -> None:
        self.session.announce(body)

    def receive_buffer(self, *_: Any) -> None: ...

    def on_lost(self, *_: Any) -> None:
        self.lost += 1


class Backend(base.Backend):
    name = "test"
    capabilities = Capabilities(tracks_writers=True)

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.stored: set[int] = set()
        self.closed = False

    async def put(self, block: Any, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        self.stored.add(block_id)
        return int(block.nbytes)

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> Fetched:
        raise NotImplementedError

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        self.stored.discard(block_id)

    async def close(self) -> None:
        self.closed = True
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def attached(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, open_backend: Callable[[], Coroutine[Any, Any, Backend]]
) -> AsyncIterator[Engine]:
    monkeypatch.setattr(backend_module, "open_backend", lambda kind, context: open_backend())
    async with serving(controller) as (address, _):
        engine = Engine([address], "c", cast(Any, None))
        await engine.open(10.0)
        try:
            yield engine
        finally:
            with suppress(RuntimeError):
                await engine.close()


def opens(backend: Backend) -> Callable[[], Coroutine[Any, Any, Backend]]:
    """For ``attached``: the backend is there at once."""

    async def opened() -> Backend:
        return backend

    return opened


def put(engine: Engine) -> asyncio.Task[Any]:
    return asyncio.ensure_future(engine.put(block_of_bytes(1000), Commit("p", append=64), timeout_s=60.0))


async def test_blocks_whose_commit_is_refused_after_its_put_was_given_up_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, backend = Controller([UNIT]), Backend()

    async with attached(controller, monkeypatch, opens(backend)) as engine:
        putting = put(engine)
        await until(lambda: bool(controller.commits))
        putting.cancel()
        with suppress(asyncio.CancelledError):
            await putting
        connection, request = controller.commits[0]
        connection.fail(request, CapacityError("the sample budget is used up"))
        await until(lambda: not backend.stored)


async def test_a_put_whose_client_is_closed_during_its_commit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([UNIT])

    async with attached(controller, monkeypatch, opens(Backend())) as engine:
        putting = put(engine)
        await until(lambda: bool(controller.commits))
        await engine.close()
        with pytest.raises(NotInitializedError, match="is closed"):
            await putting


async def test_a_block_that_is_dropped_while_it_is_written_to_a_device_goes_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, backend, host = Controller([UNIT], "simple"), Backend(), torch.device("cpu")
    store = DeviceStore(StoreContext("device", 1 << 20, {}, ""), DeviceMemory(host, 1 << 20))

    async def dropped_meanwhile(copy: Callable[[], None]) -> None:
        copy()
        await store.free(await store.inventory())

    async with attached(controller, monkeypatch, opens(backend)) as engine:
        engine._device_units._units[host] = cast(Any, SimpleNamespace(store=store, info=UNIT, close=store.close))
        engine._device_units._run_copy = dropped_meanwhile
        block = block_of_bytes(1000)
        putting = asyncio.ensure_future(engine.put(block, Commit("p", append=64), timeout_s=60.0, device=host))
        await until(lambda: bool(controller.commits) or putting.done())
        assert backend.stored
        assert store.stats().used == 0
        putting.cancel()


async def test_an_error_of_a_device_at_the_close_does_not_keep_the_backend_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend()

    async def fail() -> None:
        raise RuntimeError("the GPU fell off the bus")

    async with attached(Controller([UNIT]), monkeypatch, opens(backend)) as engine:
        await engine._backend.ready()
        monkeypatch.setattr(engine._device_units, "close", fail)
        with pytest.raises(RuntimeError, match="fell off"):
            await engine.close()
        assert backend.closed


async def test_a_put_whose_client_is_closed_while_there_are_no_units_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with attached(Controller([]), monkeypatch, opens(Backend())) as engine:
        putting = put(engine)
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(NotInitializedError, match="is closed"):
            await asyncio.wait_for(putting, 5.0)


async def test_a_backend_that_opens_while_the_client_is_closed_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, opening, go_on = Backend(), asyncio.Event(), asyncio.Event()

    async def opened() -> Backend:
        opening.set()
        await go_on.wait()
        return backend

    async with attached(Controller([UNIT]), monkeypatch, opened) as engine:
        putting = put(engine)
        await opening.wait()
        await engine.close()
        go_on.set()
        with pytest.raises(NotInitializedError, match="is closed"):
            await putting
        assert backend.closed


async def test_a_backend_that_cannot_be_closed_does_not_keep_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller([UNIT])

    backend = Backend(RuntimeError("of a user's manager"))
    async with attached(controller, monkeypatch, opens(backend)) as engine:
        putting = put(engine)
        await until(lambda: bool(controller.commits))
        with pytest.raises(RuntimeError, match="of a user's manager"):
            await engine.close()
        await until(lambda: controller.lost == 1)
        with suppress(NotInitializedError):
            await putting


async def test_the_controller_forgets_announcements_of_blocks_that_were_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(Backend):
        capabilities = Capabilities()
        refusals = 1

        async def put(self, block: Any, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
            if self.refusals:
                self.refusals -= 1
                raise CapacityError("full")
            return await super().put(block, block_id, unit, wait_s=wait_s)

    controller, backend = Controller([UNIT]), Full()

    async with attached(controller, monkeypatch, opens(backend)) as engine:
        putting = put(engine)
        await until(lambda: bool(controller.commits))
        assert {*controller.session.announced} == backend.stored
        connection, request = controller.commits[0]
        connection.reply(request, Committed(b""))
        await putting
