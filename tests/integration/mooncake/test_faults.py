from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.mooncake.clients import client
from tests.integration.mooncake.conftest import FREE_PORTS, MIB, Unit, block_of_bytes, eventually, settings_of
from tests.waiting import wait_until
from transfer_queue.columns.tensors import encode
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    StartError,
    StorageKeyNotFoundError,
    WaitTimeoutError,
)
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.mooncake.admin import Admin
from transfer_queue.storage.mooncake.master import MasterEndpoints, MasterProcess
from transfer_queue.storage.mooncake.settings import MasterSettings, parse_settings
from transfer_queue.storage.mooncake.store import open_store

StartUnit = Callable[..., Unit]


class Overridden:
    """An object with some of its methods replaced."""

    def __init__(self, other: Any, **methods: Callable[..., Any]) -> None:
        self._other = other
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def same_ports(endpoints: MasterEndpoints) -> dict[str, Any]:
    def port(address: str) -> int:
        return int(address.rpartition(":")[2])

    return {
        "rpcPort": port(endpoints.master_server_address),
        "httpMetadataPort": port(endpoints.metadata_server.split("/")[2]),
        "metricsPort": port(endpoints.admin_address),
    }


async def test_restarted_master_means_lost_blocks_and_a_unit_that_goes_on(
    own_master: MasterProcess, start_unit: StartUnit, tmp_path: Path, run: str
) -> None:
    endpoints = own_master.start()
    settings = settings_of(endpoints)
    unit = start_unit(settings)
    unit.ask("registered", 0, run)
    async with client(settings, run) as backend:
        block = block_of_bytes(MIB)
        await backend.put(block, 1, unit.info, wait_s=5)
        os.kill(own_master.pid or 0, signal.SIGKILL)
        own_master.stop()
        assert unit.losses == 0  # unreachable is not lost
        second = MasterProcess(MasterSettings(**same_ports(endpoints)), tmp_path / "second.log")
        second.start()
        try:
            await asyncio.to_thread(wait_until, lambda: unit.losses == 1, "the loss is reported")
            # From here on rows are kept, also those that come before the unit has taken up its segment.
            await eventually(lambda: backend.put(block, 2, unit.info, wait_s=0.1), (ConnectionLostError, CapacityError))
            await asyncio.to_thread(wait_until, lambda: unit.losses + unit.doubts == 2, "the segment is under watch")
            assert (unit.losses, unit.doubts) == (1, 1)
            assert unit.ask("inventory") == [2]
            lost = [BlockRead(unit.info, 1, nbytes=block.nbytes)]
            with pytest.raises(StorageKeyNotFoundError, match=f"tq/{run}/1"):
                # The connection to the old master fails first.
                await eventually(lambda: backend.get(lost, timeout_s=30), ConnectionLostError)
            (await backend.get([BlockRead(unit.info, 2, nbytes=block.nbytes)], timeout_s=30)).release()
            assert unit.losses == 1
        finally:
            unit.kill()
            await backend.close()
            second.stop()


async def test_killed_master_gives_errors_within_the_timeout(
    own_master: MasterProcess, start_unit: StartUnit, run: str
) -> None:
    settings = settings_of(own_master.start())
    unit = start_unit(settings)
    async with client(settings, run) as backend:
        block = block_of_bytes(MIB)
        await backend.put(block, 1, unit.info, wait_s=5)
        os.kill(own_master.pid or 0, signal.SIGKILL)
        with pytest.raises(ConnectionLostError, match="the Mooncake master does not answer"):
            await asyncio.wait_for(backend.put(block, 2, unit.info, wait_s=60), 60)
        with pytest.raises(WaitTimeoutError, match="did not answer in time"):
            await backend.get([BlockRead(unit.info, 1, nbytes=block.nbytes)], timeout_s=0.5)


async def test_puts_do_not_need_the_metadata_server_once_buffers_are_registered(
    master: MasterEndpoints, start_unit: StartUnit, run: str
) -> None:
    unit = start_unit(settings_of(master), 6)
    async with client(settings_of(master), run) as backend:
        block = block_of_bytes(16 * MIB)
        await backend.put(block_of_bytes(MIB), 1, unit.info, wait_s=5)

        def refused(*_: int) -> int:
            return -600  # as the engine does when its metadata server is away

        engine = backend._store._raw
        backend._store._raw = Overridden(engine, register_buffer=refused)
        small = backend.put(block_of_bytes(MIB // 2), 3, unit.info, wait_s=5)
        await asyncio.gather(backend.put(block, 2, unit.info, wait_s=5), small)
        backend._store._raw = engine
        fetched = await backend.get([BlockRead(unit.info, 2, nbytes=block.nbytes)], timeout_s=30)
        assert bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
        fetched.release()


async def test_silent_master_neither_blocks_the_caller_nor_leaves_a_given_up_block(
    own_master: MasterProcess, start_unit: StartUnit, run: str
) -> None:
    settings = settings_of(own_master.start())
    unit = start_unit(settings)
    unit.ask("registered", 0, run)
    async with client(settings, run) as backend:
        block = block_of_bytes(8 * MIB)
        await backend.put(block, 1, unit.info, wait_s=5)
        os.kill(own_master.pid or 0, signal.SIGSTOP)
        put = asyncio.create_task(backend.put(block, 2, unit.info, wait_s=5))
        with pytest.raises(WaitTimeoutError):
            await backend.get([BlockRead(unit.info, 1, nbytes=block.nbytes)], timeout_s=0.3)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        os.kill(own_master.pid or 0, signal.SIGCONT)
        fetched = await backend.get([BlockRead(unit.info, 1, nbytes=block.nbytes)], timeout_s=30)
        assert bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
        fetched.release()

        async def only_the_first() -> None:
            assert await asyncio.to_thread(unit.ask, "inventory") == [1]

        await eventually(only_the_first, AssertionError)
        # Every buffer came back: one as long as all of them can be taken.
        (await backend.pool.take(backend.pool.limit, asyncio.get_running_loop().time() + 5)).release()


async def test_memory_of_a_put_that_was_given_up_stays_until_the_engine_lets_go_of_it(
    master: MasterEndpoints, start_unit: StartUnit, run: str
) -> None:
    unit = start_unit(settings_of(master), 4)
    values = np.zeros((64, MIB // 2), np.uint8)
    memory = weakref.ref(values)
    block = encode({"x": torch.from_numpy(values)})
    async with client(settings_of(master, callTimeout=1), run) as backend:
        unit.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(ConnectionLostError, match="did not answer within 1 s"):
                await backend.put(block, 1, unit.info, wait_s=5)
            del block, values
            gc.collect()
            assert memory() is not None
        finally:
            unit.process.send_signal(signal.SIGCONT)

        async def is_gone() -> None:
            gc.collect()
            assert memory() is None

        await eventually(is_gone, AssertionError)


async def test_waiting_for_a_long_transfer_leaves_the_processor_to_the_transfer(
    master: MasterEndpoints, start_unit: StartUnit, run: str
) -> None:
    """The engine polls while it waits; nothing but the thread that does gets the lower priority."""

    def priorities() -> list[int]:
        found = []
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # ended meanwhile
                found.append(os.getpriority(os.PRIO_PROCESS, int(task)))
        return found

    async def lowered(count: int) -> None:
        assert sum(priority > usual for priority in priorities()) == count

    unit = start_unit(settings_of(master), 5)
    block = block_of_bytes(32 * MIB)
    async with client(settings_of(master), run) as backend:
        usual = max(priorities())
        unit.process.send_signal(signal.SIGSTOP)
        try:
            put = asyncio.create_task(backend.put(block, 1, unit.info, wait_s=5))
            await eventually(lambda: lowered(1), AssertionError)
        finally:
            unit.process.send_signal(signal.SIGCONT)
        await put
        await eventually(lambda: lowered(0), AssertionError)
        await backend.discard(1, unit.info)


async def test_killed_unit_gives_an_error_that_lists_the_keys(
    master: MasterEndpoints, start_unit: StartUnit, run: str
) -> None:
    settings = settings_of(master)
    unit = start_unit(settings, 3)
    async with client(settings, run) as backend:
        block = block_of_bytes(MIB)
        for number in (1, 2):
            await backend.put(block, number, unit.info, wait_s=5)
        unit.kill()
        reads = [BlockRead(unit.info, number, nbytes=block.nbytes) for number in (1, 2)]
        with pytest.raises(ConnectionLostError, match=rf"\(-800\): tq/{run}/1, tq/{run}/2"):
            await backend.get(reads, timeout_s=30)
        with pytest.raises((ConnectionLostError, CapacityError)):
            await backend.put(block, 3, unit.info, wait_s=0.2)


async def test_unit_that_is_stopped_for_three_leases_gives_right_bytes_or_an_error(
    tmp_path: Path, start_unit: StartUnit, run: str
) -> None:
    lease_s = 0.5
    master = MasterProcess(MasterSettings(**FREE_PORTS, leaseTtlMs=int(1000 * lease_s)), tmp_path / "master.log")
    try:
        settings = settings_of(master.start())
        unit = start_unit(settings)
        async with client(settings, run) as backend:
            block = block_of_bytes(16 * MIB)
            await backend.put(block, 1, unit.info, wait_s=5)
            read = [BlockRead(unit.info, 1, nbytes=block.nbytes)]
            unit.process.send_signal(signal.SIGSTOP)
            try:
                reading = asyncio.create_task(backend.get(read, timeout_s=30))
                await asyncio.wait([reading], timeout=3 * lease_s)
            finally:
                unit.process.send_signal(signal.SIGCONT)
            for attempt in (reading, backend.get(read, timeout_s=30)):
                try:
                    fetched = await attempt
                except (ConnectionLostError, WaitTimeoutError):
                    continue
                assert bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
                fetched.release()
            fetched = await eventually(lambda: backend.get(read, timeout_s=30), ConnectionLostError)
            assert bytes(fetched.blocks[0].view.select(None, None).to_bytes()) == bytes(block.to_bytes())
            fetched.release()
    finally:
        master.stop()


async def test_unit_that_was_taken_for_dead_notices_when_it_wakes_up(
    tmp_path: Path, start_unit: StartUnit, run: str
) -> None:
    master = MasterProcess(MasterSettings(**FREE_PORTS, clientTtl=2), tmp_path / "master.log")
    try:
        endpoints = master.start()
        settings = settings_of(endpoints)
        unit = start_unit(settings)
        async with client(settings, run) as backend:
            await backend.put(block_of_bytes(MIB), 1, unit.info, wait_s=5)
            unit.process.send_signal(signal.SIGSTOP)
            admin = Admin(endpoints.admin_address)
            segment = unit.info.attributes["segment"]
            await asyncio.to_thread(wait_until, lambda: admin.segment_usage(segment) is None, "the segment is gone")
            unit.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(wait_until, lambda: unit.losses + unit.doubts == 2, "the segment is back")
            assert unit.losses == 1
            await backend.put(block_of_bytes(MIB), 2, unit.info, wait_s=5)
    finally:
        master.stop()


async def test_block_freed_in_the_middle_of_a_read_is_an_error_and_never_wrong_bytes(
    master: MasterEndpoints, units: list[Unit], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(settings_of(master), run) as backend:
        block = block_of_bytes(MIB)
        await backend.put(block, 1, units[0].info, wait_s=5)
        store = backend._store
        read = store.read

        def read_then_lose(keys: list[str], targets: list[Any]) -> list[int]:
            results = read(keys, targets)
            assert results == [0]
            assert store.remove(keys) == [0]  # at once, although the read has a lease on it
            return results

        monkeypatch.setattr(store, "read", read_then_lose)
        with pytest.raises(StorageKeyNotFoundError, match=f"tq/{run}/1"):
            await backend.get([BlockRead(units[0].info, 1, nbytes=block.nbytes)], timeout_s=30)


class EvictingMaster(MasterProcess):
    """As somebody else may run it: evicts whatever is not pinned."""

    def _launch(self, binary: str, flags: dict[str, object]) -> None:
        super()._launch(binary, {name: value for name, value in flags.items() if not name.startswith("eviction")})


async def test_unread_blocks_are_not_evicted_by_a_master_that_evicts(
    tmp_path: Path, start_unit: StartUnit, run: str
) -> None:
    master = EvictingMaster(MasterSettings(**FREE_PORTS, leaseTtlMs=100), tmp_path / "master.log")
    try:
        settings = settings_of(master.start(), evictionDisabled=False)
        unit = start_unit(settings)
        unit.ask("registered", 0, run)
        async with client(settings, run) as backend:
            block = block_of_bytes(4 * MIB)
            stored = []
            try:
                for number in range(100):
                    await backend.put(block, number, unit.info, wait_s=0)
                    stored.append(number)
            except CapacityError:
                pass
            assert 10 <= len(stored) < 17
            with pytest.raises(CapacityError):
                await backend.put(block, 100, unit.info, wait_s=1.5)
            assert sorted(unit.ask("inventory")) == stored
            unit.ask("free", stored)
            await backend.put(block, 101, unit.info, wait_s=5)
    finally:
        master.stop()


def test_unit_waits_for_a_master_that_starts_later(own_master: MasterProcess, tmp_path: Path) -> None:
    endpoints = own_master.start()
    own_master.stop()
    late = MasterProcess(MasterSettings(**same_ports(endpoints)), tmp_path / "late.log")
    found: list[Unit] = []
    waiting = threading.Thread(target=lambda: found.append(Unit(settings_of(endpoints), 0, 64 * MIB)))
    waiting.start()
    late.start()
    waiting.join(30)
    try:
        assert found
    finally:
        for unit in found:
            unit.kill()
        late.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masterServerAddress": "127.0.0.1:1"}, r"master at 127\.0\.0\.1:1 cannot be reached.*start mooncake_master"),
        (
            {"metadataServer": "http://127.0.0.1:1/metadata"},
            r"metadata server at http://127\.0\.0\.1:1/meta.* cannot be",
        ),
        (
            {"metadataServer": "etcd://127.0.0.1:1"},
            r"metadataServer: etcd://127\.0\.0\.1:1 cannot be reached.*start etcd",
        ),
        ({"masterServerAddress": "etcd://127.0.0.1:1"}, r"masterServerAddress: none of the etcd members .* start etcd"),
        ({"masterServerAddress": "no-such-host.invalid:50051"}, r"masterServerAddress: cannot resolve.*no-such-host"),
        ({"protocol": "rdma", "deviceName": "mlx5_77"}, r"deviceName: no InfiniBand device 'mlx5_77'"),
    ],
)
def test_start_that_cannot_work_says_which_setting(
    master: MasterEndpoints, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartError, match=message) as caught:
        open_store(parse_settings(settings_of(master, startTimeout=0.3, **changes)), 0)
    assert "\n" not in str(caught.value)
