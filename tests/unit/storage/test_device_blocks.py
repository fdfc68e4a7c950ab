"""Blocks that stay on a device, here in memory of the host: all but what CUDA does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.client.arguments import check_placement
from transfer_queue.client.kv import KvOperations
from transfer_queue.client.options import ClientOptions
from transfer_queue.client.placement import Placement
from transfer_queue.columns import device_memory
from transfer_queue.columns.device_memory import DeviceBlockView, DeviceMemory, Shared, device_of
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import CapacityError, InvalidInputError
from transfer_queue.runtime.block_server import _ClientPeer
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.metrics import controller_metrics
from transfer_queue.runtime.picture import picture
from transfer_queue.runtime.why import explain
from transfer_queue.storage.base import DEVICE, StoreContext, UnitInfo
from transfer_queue.storage.conformance.blocks import block_of_bytes, decoded, mixed_block
from transfer_queue.storage.memory.client import _Link
from transfer_queue.storage.memory.device import DeviceStore
from transfer_queue.wire.messages import Hello, Join

HOST = torch.device("cpu")
MIB = 1 << 20


async def run_copy(copy: Callable[[], Any]) -> Any:
    return copy()


def test_a_block_reads_as_it_was_written_whole_and_in_part() -> None:
    values, block = mixed_block(40)
    memory = DeviceMemory(HOST, 2 * block.nbytes)
    memory.write(block, 512)
    view = DeviceBlockView(memory.flat[512 : 512 + block.nbytes])
    assert (view.rows, view.nbytes, view.fields) == (40, block.nbytes, block.fields)
    for rows in (None, (3, 9)):
        found = decoded((view, rows), list(values))
        wanted = slice(*rows) if rows else slice(None)
        for name in ("dense", "scalar", "ragged"):
            assert all(torch.equal(a, b) for a, b in zip(found[name], values[name][wanted], strict=True)), name
        assert [found[name] for name in ("text", "object")] == [values[name][wanted] for name in ("text", "object")]
    assert bytes(view.select(None, None).to_bytes()) == bytes(block.to_bytes())


def test_a_store_keeps_its_budget_and_uses_freed_memory_again() -> None:
    async def scenario() -> None:
        store = DeviceStore(StoreContext("device", 4 * MIB, {}, ""), DeviceMemory(HOST, 4 * MIB))
        blocks = {(7 << 32) + number: block_of_bytes(MIB) for number in range(4)}
        taken = []
        for number, block in blocks.items():
            try:
                taken.append(number)
                await store.put(block, number, run_copy)
            except CapacityError:
                taken.pop()
        assert len(taken) == 3  # each has a header too
        assert sorted(await store.inventory()) == taken
        views = store._views(store._blocks[taken[1]])
        assert b"".join(views) == bytes(blocks[taken[1]].to_bytes())
        await store.free(taken[:1])
        await store.put(block_of_bytes(MIB), (8 << 32) + 1, run_copy)
        assert store.stats().blocks == 3
        await store.free(taken[1:2])
        with pytest.raises(ZeroDivisionError):
            await store.put(block_of_bytes(MIB), (8 << 32) + 2, fail)
        assert store.stats().blocks == 2
        await store.close()

    async def fail(copy: Callable[[], Any]) -> Any:
        raise ZeroDivisionError

    asyncio.run(scenario())


def test_clients_put_nothing_to_the_device_of_another_process() -> None:
    placement = Placement(0)
    placement.update([UnitInfo(0, "host", "", MIB), UnitInfo(1, "device", "", 8 * MIB, attributes={DEVICE: "GPU"})])
    assert [unit.name for unit in placement.candidates(1)] == ["host"]
    assert placement.writable_units == 1
    assert placement.get(1) is not None
    with pytest.raises(CapacityError):
        placement.parts(2 * MIB, None)


def test_the_device_of_a_put_is_the_one_of_its_thread_unless_its_tensors_are_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.get_ident() == caller else 0)
    assert check_placement("device") == torch.device("cuda", 3)
    assert check_placement("host") is None
    assert device_of(block_of_bytes(MIB)) is None


class Exported(DeviceMemory):
    exports = 0

    @property
    def shared(self) -> Shared:
        return Shared(self.name, "GPU-1", self.nbytes)

    def export(self) -> list[Any]:
        self.exports += 1
        return [0, b"memory", self.nbytes, 0, b"counters", 5, b"event", True]


def reader_of(store: DeviceStore) -> _Link:
    peer = _ClientPeer(Hello("client", "reader", writer=5))

    async def request(message: Any, **_: Any) -> Any:
        return cast(Any, store.serve(peer, message, None)).reply, None

    welcome = SimpleNamespace(attributes=store.connected(peer))
    return _Link(cast(Any, SimpleNamespace(welcome=welcome, request=request)))


async def test_memory_is_exported_to_readers_that_map_it_alone_and_freed_by_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[Any] = []

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", lambda *given, **_: released.append(given))
    memory = Exported(HOST, MIB)
    store = DeviceStore(StoreContext("device", MIB, {}, ""), memory)
    assert await reader_of(store).map_device(run_copy, 60.0)  # its own
    monkeypatch.setattr(device_memory, "_own", {})
    assert not await reader_of(store).map_device(run_copy, 60.0)  # on another GPU
    assert memory.exports == 0
    monkeypatch.setattr(device_memory, "device_number", lambda shared: 0)
    link = reader_of(store)
    assert not await link.map_device(run_copy, 60.0)
    assert not await link.map_device(run_copy, 60.0)
    assert (memory.exports, released, link.on_device) == (1, [(b"counters", 5)], False)
    await store.close()
    assert memory.flat.untyped_storage().nbytes() == 0


async def test_devices_of_clients_do_not_count_as_storage_units_and_are_forgotten_in_the_end() -> None:
    controller = Controller(ControllerConfig(expected_units=2), ControlCore(), asyncio.get_running_loop())

    def join(number: int, attributes: dict[str, Any]) -> None:
        line = cast(Any, SimpleNamespace(principal=None))
        controller.units.join(line, Join(f"u{number}", f"i{number}", "", MIB, 7, attributes=attributes), [], 0.0)

    join(0, {})
    for number in range(1, 101):
        join(number, {DEVICE: "GPU"})
    wanted = "1 of 2 storage units are"
    assert controller.missing() == f"{wanted} registered"
    assert f"{wanted} connected" in explain(picture(controller))
    said = b"".join(controller_metrics(controller).text()).decode()
    assert [line for line in said.splitlines() if line.startswith("tq_unit_used_bytes")] == [
        'tq_unit_used_bytes{unit="u0"} 7.0'
    ]
    assert 'tq_device_used_bytes{unit="u100"} 7.0' in said
    for session in list(controller.units):
        assert session.connection is not None
        controller.units.disconnected(session, session.connection, 1.0)
    controller.units.expire(2.0, 2.0)
    lost = [unit.info.name for unit in controller.units.saved()[1]]
    assert lost == ["u0", *(f"u{number}" for number in range(37, 101))]


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ("device", "placement 'device': torch finds no CUDA device here"),
        ("gpu", "must be 'host' or 'device', not 'gpu'"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, placement: Any, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    operations = KvOperations(None, ClientOptions(), None)  # type: ignore[arg-type]  # refused before it is used
    with pytest.raises(InvalidInputError, match=problem):
        operations.put(["k"], "p", TensorDict({"x": torch.ones(1)}, [1]), None, None, placement=placement)
