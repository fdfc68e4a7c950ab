"""A client inside a demanding program: thousands of calls, a caller that computes, forks, many loops and threads.

``TQ_TEST_COMPUTE_S``: seconds of computation in the caller while a put is under way; by default many times what the
servers wait for a silent peer (3 s), which is what a client without its own I/O thread fails at.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import TIMING, Stack
from tests.integration.test_client_process import in_forked_child
from tests.waiting import wait_until

COMPUTE_S = float(os.environ.get("TQ_TEST_COMPUTE_S", "20"))


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count), "y": torch.ones(count, 3)}, [count])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_thousand_calls_of_all_kinds_leave_descriptors_and_threads_as_they_are(
    queue: Stack, partition: str
) -> None:
    client = tq.get_client()

    def ten_calls(number: int) -> None:
        key = f"k{number % 8}"
        tq.kv_put(key, partition, {"x": torch.tensor(number), "y": torch.ones(3)}, tag={"n": number})
        assert tq.kv_batch_get(key, partition)["x"].tolist() == [number]
        assert tq.kv_list(partition)[partition][key] == {"n": number}
        tq.kv_clear(key, partition)
        meta = client.put(rows(2, number), partition_id=partition)
        fetched = client.get_meta(["x"], 2, partition, task_name="t")
        assert fetched.global_indexes == meta.global_indexes
        assert client.get_data(fetched)["x"].tolist() == [number, number + 1]
        assert client.check_production_status(["x"], partition)
        client.reset_consumption(partition, "t")
        client.clear_samples(meta)

    for number in range(10):  # the pool opens its connections with the 16th short call, to each unit when it is used
        ten_calls(number)
        large = client.put({"x": torch.zeros(1, 1 << 16)}, partition_id=partition)  # what follows goes to the next unit
        client.clear_samples(large)
    before = descriptors(), threading.active_count()
    for _ in range(2):
        for number in range(100):
            ten_calls(number)
        assert descriptors() <= before[0]
        assert threading.active_count() <= before[1]


@pytest.mark.timeout(120 + 4 * COMPUTE_S)
def test_a_put_goes_on_while_its_caller_computes(queue: Stack, partition: str) -> None:
    """The event loop that awaits the put does not get to run; the put is carried out nevertheless."""
    assert TIMING["peerTimeout"] < COMPUTE_S

    async def main() -> tuple[int, tq.KVBatchMeta]:
        data = TensorDict({"x": torch.arange(2_000_000.0).view(8, 250_000)}, [8])
        put = asyncio.ensure_future(tq.async_kv_batch_put([str(number) for number in range(8)], partition, data))
        await asyncio.sleep(0)  # it is under way
        until = time.monotonic() + COMPUTE_S
        steps = 0
        while time.monotonic() < until:
            steps += sum(range(1000)) // 499500
        assert not put.done()  # this loop has not run since
        wait_until(lambda: len(tq.kv_list(partition).get(partition, {})) == 8, "the rows are there")
        return steps, await put

    steps, meta = asyncio.run(main())
    assert steps > 0
    assert meta.fields == ["x"]
    assert tq.kv_batch_get("7", partition)["x"].values()[-1].item() == 1_999_999.0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_amid_puts_of_other_threads_leaves_both_sides_working(queue: Stack, partition: str) -> None:
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        client = tq.get_client()
        while not stop.is_set():
            written.append(len(client.put(rows(4), partition_id=f"{partition}-stream")))

    def child() -> None:  # numpy: torch's own thread pool does not survive a fork
        for number in range(5):
            tq.kv_put(f"child{number}", partition, {"x": torch.tensor(number)})
        got: Any = tq.kv_batch_get([f"child{number}" for number in range(5)], partition)
        assert got["x"].numpy().tolist() == list(range(5))
        assert asyncio.run(tq.async_kv_batch_get("parent", partition))["x"].numpy().tolist() == [7]

    tq.kv_put("parent", partition, {"x": torch.tensor(7)})
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        wait_until(lambda: len(written) > 3, "puts are under way")
        codes = []
        for _ in range(3):
            codes.append(in_forked_child(child))
            count = len(written)
            wait_until(lambda count=count: len(written) > count + 2, "the parent's puts go on")
        stop.set()
        for writer in writers:
            writer.result()
    assert codes == [0, 0, 0]
    assert tq.kv_batch_get("child4", partition)["x"].tolist() == [4]
    index, status = tq.get_client().get_production_status(["x"], f"{partition}-stream")
    assert index is not None
    assert status is not None
    assert len(index) == sum(written)
    assert bool(status.all())


def test_loops_and_threads_of_one_client_share_a_partition_without_loss(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    produced, consumed = 4 * 3 * 20, 4 * 3 * 20
    daemon: list[int] = []

    async def produce(start: int) -> None:
        for number in range(20):
            await client.async_put(rows(3, start + 3 * number), partition_id=partition)

    async def consume() -> list[int]:
        values: list[int] = []
        for _ in range(20):
            meta = await client.async_get_meta(["x", "y"], 3, partition, task_name="t", timeout=60.0)
            values += (await client.async_get_data(meta))["x"].tolist()
        return values

    def watch() -> None:  # blocking calls from a daemon thread, meanwhile
        while not client.check_consumption_status("t", partition) or len(daemon) < 3:
            daemon.append(len(tq.kv_list(partition)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        consumers = [pool.submit(lambda: asyncio.run(consume())) for _ in range(4)]
        producers = [pool.submit(lambda start=start: asyncio.run(produce(start))) for start in range(0, produced, 60)]
        for producer in producers:
            producer.result(timeout=90)
        values = [value for consumer in consumers for value in consumer.result(timeout=90)]
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    assert len(values) == consumed
    assert sorted(values) == list(range(produced))
