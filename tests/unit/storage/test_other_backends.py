"""Backends beside the memory one, where the moments of two things meet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import until
from transfer_queue.compat.registered.client import RegisteredBackend
from transfer_queue.compat.registered.unit import RegisteredStore
from transfer_queue.errors import ConnectionLostError
from transfer_queue.storage.base import BackendContext, StoreContext, UnitInfo
from transfer_queue.storage.mooncake import codes
from transfer_queue.storage.mooncake import unit as mooncake_unit
from transfer_queue.storage.mooncake.settings import parse_settings
from transfer_queue.storage.mooncake.unit import MooncakeStore
from transfer_queue.storage.yuanrong.client import YuanrongBackend
from transfer_queue.wire import messages as wire

UNIT = UnitInfo(1, "u", "127.0.0.1:1", 1 << 20)
BLOCK = 7 << 32


class Peer:
    client_id = "c"

    def __init__(self, writer: int) -> None:
        self.writer = writer


class Channel:
    def __init__(self, writer: int) -> None:
        self.writer = writer
        self.closed = False
        self.sweeping = asyncio.get_running_loop().create_future()

    async def request(self, *_: Any, **__: Any) -> Any:
        return await self.sweeping

    def close(self) -> None:
        self.closed = True
        if not self.sweeping.done():
            self.sweeping.set_exception(ConnectionLostError("closed"))
            self.sweeping.exception()


class Connecting:
    """Connections of clients that are made when ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.channels: list[Channel] = []

    def context(self, writer: int) -> BackendContext:
        async def connect(address: str) -> Any:
            await self.go_on.wait()
            self.channels.append(Channel(writer))
            return self.channels[-1]

        return BackendContext("c", writer, "r", {}, connect, cast(Callable[..., Awaitable[Any]], None))


class Manager:
    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "made",
    [
        lambda context: RegisteredBackend(context, cast(Any, Manager())),
        lambda context: YuanrongBackend(context, cast(Any, None)),
    ],
    ids=["registered", "yuanrong"],
)
async def test_a_backend_that_is_closed_while_it_connects_keeps_no_connection(made: Callable[..., Any]) -> None:
    connecting = Connecting()
    backend = made(connecting.context(7))
    waiting = asyncio.ensure_future(backend._channel(UNIT))
    await asyncio.sleep(0)
    await backend.close()
    connecting.go_on.set()
    with pytest.raises(ConnectionLostError, match="is closed"):
        await waiting
    assert [channel.closed for channel in connecting.channels] == [True]


async def test_a_backend_that_is_renewed_while_it_connects_does_not_use_the_connection_of_the_old_writer() -> None:
    connecting = Connecting()
    backend = RegisteredBackend(connecting.context(7), cast(Any, Manager()))
    waiting = asyncio.ensure_future(backend._channel(UNIT))
    await asyncio.sleep(0)
    assert backend.renew(connecting.context(8))
    connecting.go_on.set()
    assert cast(Any, await waiting).writer == 8
    assert [(channel.writer, channel.closed) for channel in connecting.channels] == [(7, True), (8, False)]
    connecting.channels[1].close()
    await backend.close()


async def test_a_dead_block_wakes_its_writer_whatever_others_ask_at_that_moment() -> None:
    store = RegisteredStore(StoreContext("u", 1 << 20, {}, ""))
    writer, other = Peer(7), Peer(8)
    for peer in (writer, other):
        store.connected(peer)
    await cast(Any, store.serve(writer, wire.Alloc(BLOCK, 10), None))
    store.serve(writer, wire.Fill(BLOCK), None)
    asked = asyncio.ensure_future(cast(Any, store.serve(writer, wire.Sweep(b"", 60.0), None)))
    freed = asyncio.ensure_future(store.free([BLOCK]))
    others = asyncio.ensure_future(cast(Any, store.serve(other, wire.Sweep(b"", 60.0), None)))
    swept = await asyncio.wait_for(asked, 5.0)
    assert len(swept.reply.blocks) == 8
    await freed
    others.cancel()


async def test_mooncake_blocks_that_cannot_be_removed_now_are_tried_again_though_others_are_freed_meanwhile() -> None:
    tried: list[list[int]] = []

    class Store:
        def remove_blocks(self, run: str, blocks: Sequence[int]) -> list[int]:
            tried.append(list(blocks))
            return [block for block in blocks if block == 1]

        def close(self) -> None: ...

    settings = parse_settings({"metadataServer": "P2PHANDSHAKE", "masterServerAddress": "127.0.0.1:1"})
    store = MooncakeStore(StoreContext("u", 1 << 20, {}, ""), settings)
    store._store = cast(Any, Store())
    store.registered(1, "r")
    await asyncio.gather(store.free([1]), store.free([2]))
    await store.free([3])
    assert tried == [[1], [2], [1, 3]]
    await store.close()


@pytest.mark.parametrize("lost", ["all", "second"])
async def test_a_mooncake_master_that_goes_while_it_is_asked_makes_no_block_look_lost(lost: str) -> None:
    class Store:
        def places(self, keys: list[str]) -> dict[str, tuple[int, str]]:
            return {} if lost == "all" else {"tq/r/1": (10, "here")}

        def verify(self, keys: list[str]) -> list[int]:
            return [codes.NOT_REACHED] * len(keys)

        def close(self) -> None: ...

    class Admin:
        def keys(self, prefix: str) -> list[str]:
            return [f"{prefix}1", f"{prefix}2"]

    settings = parse_settings({"metadataServer": "P2PHANDSHAKE", "masterServerAddress": "127.0.0.1:1"})
    store = MooncakeStore(StoreContext("u", 1 << 20, {}, ""), settings)
    store._store, store._admin, store._endpoint = cast(Any, Store()), cast(Any, Admin()), "here"
    store.registered(1, "r")
    with pytest.raises(ConnectionLostError, match="tq/r/2"):
        await store.inventory()
    await store.close()


@pytest.mark.parametrize("master", ["127.0.0.1:1", "etcd://127.0.0.1:1"])
async def test_several_mooncake_masters_are_asked_for_a_while_before_blocks_count_as_lost(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store:
        name = "here"

        def verify(self, keys: list[str]) -> list[int]:
            return [codes.GONE]

        def remove(self, keys: list[str]) -> None: ...

        def write(self, *_: Any) -> list[int]:
            return [codes.NO_SPACE]

        def close(self) -> None: ...

    losses: list[None] = []
    settings = parse_settings({"metadataServer": "P2PHANDSHAKE", "masterServerAddress": master})
    store = MooncakeStore(StoreContext("u", 1 << 20, {}, "", lost=lambda: losses.append(None)), settings)
    store._store = cast(Any, Store())
    monkeypatch.setattr(mooncake_unit, "_CERTAIN_S", 3600.0)
    await store._look()
    assert len(losses) == (0 if master.startswith("etcd") else 1)
    monkeypatch.setattr(mooncake_unit, "_CERTAIN_S", 0.0)
    await store._look()
    assert len(losses) == 1
    await store.close()


async def test_a_dead_block_whose_sweep_got_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RegisteredStore(StoreContext("u", 1 << 20, {}, ""))
    writer = Peer(7)
    store.connected(writer)
    await cast(Any, store.serve(writer, wire.Alloc(BLOCK, 10), None))
    store.serve(writer, wire.Fill(BLOCK), None)
    await store.free([BLOCK])

    async def sweep(removed: bytes = b"") -> bytes:
        return bytes((await cast(Any, store.serve(writer, wire.Sweep(removed, 0.0), None))).reply.blocks)

    asked = await sweep()
    assert len(asked) == 8
    assert await sweep() == b""  # it may be under way
    monkeypatch.setattr("transfer_queue.compat.registered.unit._AGAIN_S", 0.0)
    assert await sweep() == asked
    assert await sweep(asked) == b""


class Owner:
    """An actor of Ray's that answers each call with the next of ``outcomes``."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.usage = self.held = self.free = self

    def remote(self, *_: Any) -> Any:
        answer: Future[Any] = Future()
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
        return SimpleNamespace(future=lambda: answer)


async def test_a_unit_in_ray_lives_through_errors_that_are_not_the_end_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.exceptions import ActorUnavailableError, RaySystemError

    from transfer_queue.storage.ray import unit
    from transfer_queue.storage.ray.cluster import RayStoreSettings

    monkeypatch.setattr(unit, "_WATCH_S", 0.0)
    said: list[str] = []
    lost: list[None] = []
    context = StoreContext("u", 1 << 20, {}, "", log=said.append, lost=lambda: lost.append(None))
    store = unit.RayStore(context, RayStoreSettings())
    away = ActorUnavailableError("the network failed", None)
    store._owner = Owner(away, RaySystemError("the raylet failed"), (5, 1))
    store._watch = asyncio.ensure_future(store._watch_for_ever())
    await until(lambda: store.stats().used == 5)
    assert not store._watch.done()
    assert not lost
    assert len(said) == 2
    while not store._watch.done():  # up to Python 3.11 wait_for loses a cancellation that meets an answer
        store._watch.cancel()
        await asyncio.sleep(0)
    store._owner = Owner(away)
    with pytest.raises(ConnectionLostError, match="cannot be asked"):
        await store.inventory()
    with pytest.raises(ConnectionLostError, match="cannot be asked"):
        await store.free([1])
