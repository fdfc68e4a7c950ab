"""A partition moves between controllers while programs use it, and while servers and movers are killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.waiting import wait_until
from transfer_queue.client.moving import move_partition
from transfer_queue.client.shards import attach
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import RequestError, WaitTimeoutError
from transfer_queue.storage.conformance.servers import Servers
from transfer_queue.wire.moves import Export

PARTITION = "train"
HOME = shard_of(PARTITION, 2)
AWAY = 1 - HOME
WRITERS = READERS = 4


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    running = Servers("simple", {}, tmp_path, shards=2, durability="process")
    yield running
    running.stop()


@pytest.fixture
def client(servers: Servers) -> Iterator[tq.TransferQueueClient]:
    client = tq.TransferQueueClient("looker", servers.address)
    yield client
    client.close()


def rows(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict({"n": numbers, "wide": numbers[:, None].repeat(1, 500)}, batch_size=[count])


class Load:
    """Writers that put numbered rows, and readers that take each of them once."""

    def __init__(self, address: str) -> None:
        self.stop = threading.Event()
        self.slowest = 0.0
        """Seconds of the longest put or fetch."""
        self.put: list[int] = []
        self.taken: Counter[int] = Counter()
        self._address = address
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WRITERS + READERS)
        self._writing = [self._pool.submit(self._write, number) for number in range(WRITERS)]
        self._reading = [self._pool.submit(self._read, number) for number in range(READERS)]

    def end(self) -> None:
        """Let the readers take what was put. Raises what a writer or reader raised."""
        self.stop.set()
        for future in [*self._writing, *self._reading]:
            future.result(120)
        self._pool.shutdown()

    def check(self) -> None:
        for future in [*self._writing, *self._reading]:
            if future.done():
                future.result()

    def _write(self, writer: int) -> None:
        client = tq.TransferQueueClient(f"writer-{writer}", self._address)
        first = writer * 1_000_000
        while not self.stop.is_set():
            started = time.monotonic()
            client.put(rows(first, 3), partition_id=PARTITION)
            self._note(started)
            self.put += range(first, first + 3)
            first += 3
            self.stop.wait(0.02)  # a rollout takes its time
        client.close()

    def _read(self, reader: int) -> None:
        client = tq.TransferQueueClient(f"reader-{reader}", self._address)
        while True:
            last = all(future.done() for future in self._writing)
            started = time.monotonic()
            try:
                meta = client.get_meta(["n", "wide"], 1 if last else 3, PARTITION, task_name="t", timeout=1)
            except WaitTimeoutError:
                if last:
                    break
                continue
            found = client.get_data(meta, layout="dense")
            self._note(started)
            assert torch.equal(found["wide"][:, 0], found["n"])
            client.clear_samples(meta)
            with self._lock:
                self.taken.update(found["n"].tolist())
        client.close()

    def _note(self, started: float) -> None:
        with self._lock:
            self.slowest = max(self.slowest, time.monotonic() - started)


def move(servers: Servers, shard: int, timeout_s: float = 60.0) -> int:
    return asyncio.run(move_partition([servers.address], PARTITION, shard, timeout_s=timeout_s)).rows


def test_a_partition_moves_with_everything_that_is_known_of_it(
    servers: Servers, client: tq.TransferQueueClient
) -> None:
    meta = client.put(rows(0, 6), partition_id=PARTITION)
    keyed = tq.TransferQueueClient("other", servers.address)
    taken = client.get_meta(["n"], 2, PARTITION, task_name="t", timeout=5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keyed.get_meta, ["n"], 9, PARTITION, task_name="late", timeout=60)
        with pytest.raises(RequestError, match="no controller shard 7"):
            move(servers, 7)
        assert move(servers, AWAY) == 6
        assert move(servers, AWAY) == 0  # it is there
        assert torch.equal(client.get_data(meta, layout="dense")["wide"], rows(0, 6)["wide"])
        rest = client.get_meta(["n"], 4, PARTITION, task_name="t", timeout=5)
        assert sorted(taken.global_indexes + rest.global_indexes) == sorted(meta.global_indexes)
        client.put(rows(6, 3), partition_id=PARTITION)
        assert len(waiting.result(60).global_indexes) == 9
    servers.kill_controller(AWAY)
    servers.restart_controller(AWAY)
    fresh = tq.TransferQueueClient("fresh", servers.address)
    assert fresh.get_partition_list() == [PARTITION]
    assert torch.equal(fresh.get_data(meta, layout="dense")["n"], torch.arange(6))
    assert move(servers, HOME) == 9
    assert torch.equal(fresh.get_data(meta, layout="dense")["n"], torch.arange(6))
    client.clear_partition(PARTITION)
    wait_until(lambda: servers.used() == 0, "no block of either controller is left")
    for other in (keyed, fresh):
        other.close()


def test_controllers_without_a_journal_refuse_to_move_a_partition(tmp_path: Path) -> None:
    servers = Servers("simple", {}, tmp_path, shards=2)
    try:
        client = tq.TransferQueueClient("looker", servers.address)
        meta = client.put(rows(0, 2), partition_id=PARTITION)
        with pytest.raises(RequestError, match=r"'train' cannot be moved: the controllers .* keep no journal"):
            move(servers, AWAY)
        assert torch.equal(client.get_data(meta, layout="dense")["n"], torch.arange(2))
        client.close()
    finally:
        servers.stop()


def test_no_row_is_lost_or_doubled_while_movers_and_controllers_are_killed(
    servers: Servers, client: tq.TransferQueueClient
) -> None:
    for number in range(20):  # rows that nobody takes, so that there is always something to copy
        client.put(TensorDict({"other": torch.full((2, 500), number)}, batch_size=[2]), partition_id=PARTITION)
    load = Load(servers.address)
    moves = 0
    try:
        wait_until(lambda: load.check() or len(load.taken) > 30, "rows come and go", 60)
        for number, victim in enumerate(("nobody", "mover", "source", "target", "nobody")):
            with moving(servers, target := AWAY if number % 2 == 0 else HOME) as mover:
                if victim == "mover":
                    mover.kill()
                elif victim != "nobody":
                    shard = target if victim == "target" else 1 - target
                    servers.kill_controller(shard)
                    servers.restart_controller(shard)
                moves += mover.wait(120) == 0
            before = len(load.taken)
            wait_until(lambda: load.check() or len(load.taken) > before + 30, "rows come and go", 60)  # noqa: B023
    finally:
        load.end()
    print(f"{len(load.put)} rows, {moves} moves, longest request {load.slowest:.2f} s")
    assert moves >= 2
    assert set(load.taken) >= set(load.put), "acknowledged rows are gone"
    assert max(load.taken.values()) == 1, "rows were taken twice"


def test_a_mover_that_holds_a_partition_again_gets_what_it_had_put_off(
    servers: Servers, client: tq.TransferQueueClient
) -> None:
    client.put(rows(0, 3), partition_id=PARTITION)

    async def copy(work: Callable[[], Any]) -> Any:
        return work()

    async def held_twice() -> list[int]:
        found = []
        mover = await attach([servers.address], "move", copy, None, 20.0)
        source = mover.engines[HOME]  # type: ignore[union-attr]
        for _ in range(2):
            exported = msgspec.msgpack.decode(await source.transfer(Export(PARTITION, True), (), 30.0))
            found.append(exported["state"]["partitions"][0]["rows"])
            if len(found) == 1:
                put = asyncio.create_task(asyncio.to_thread(client.put, rows(3, 3), partition_id=PARTITION))
                await asyncio.sleep(0.5)
                assert not put.done()
        await put
        await mover.close()
        return found

    assert asyncio.run(held_twice()) == [3, 6]


@contextmanager
def moving(servers: Servers, shard: int) -> Iterator[subprocess.Popen[bytes]]:
    """A mover that is at work."""
    code = (
        "import asyncio; from transfer_queue.client.moving import move_partition;"
        f"asyncio.run(move_partition([{servers.address!r}], {PARTITION!r}, {shard},"
        "progress=lambda nbytes: print('copying', flush=True)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as mover:
        try:
            assert mover.stdout is not None
            assert mover.stdout.readline() in (b"copying\n", b"")  # it may be there, if its last mover was killed late
            yield mover
        finally:
            mover.kill()
