"""Consumers and producers that wait: woken by what they wait for, bounded in time, at nobody else's cost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.client.locks import taking
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError
from transfer_queue.launch.local import LocalStack, default_plan


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count)}, batch_size=[count])


def waiting(stack: Stack) -> float:
    return stack.controller.metric("tq_controller_waiting")


def test_a_parked_fetch_is_woken_by_another_clients_put(queue: Stack, partition: str) -> None:
    other = tq.TransferQueueClient("other", queue.address)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(tq.get_client().get_meta, ["x"], 4, partition, task_name="t", timeout=30)
        wait_until(lambda: waiting(queue) == 1, "the fetch is parked")
        other.put(rows(3), partition_id=partition)
        assert not fetch.done()
        other.put(rows(1, 3), partition_id=partition)
        meta = fetch.result(20)
    assert tq.get_client().get_data(meta)["x"].tolist() == [0, 1, 2, 3]
    other.close()


def test_a_fetch_that_is_not_satisfied_says_what_was_missing(queue: Stack, partition: str) -> None:
    tq.get_client().put(rows(1), partition_id=partition)
    with pytest.raises(RuntimeError, match=r"(?i)timeout") as caught:
        tq.get_client().get_meta(["x"], 2, partition, task_name="t", timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert tq.get_client().get_meta(["x"], 1, partition, task_name="t").size == 1


def test_a_fetch_that_waits_for_a_misspelt_field_says_so_while_it_waits(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_put("a", partition, {"tokens": torch.ones(2)})
    hint = f"no row of partition {partition!r} has the fields ['tokns'], but ['tokens']; did you mean 'tokens'?"
    client = tq.get_client()
    unnamed = client.get_meta(["tokns"], partition_id=partition, mode="force_fetch")
    assert unnamed.field_names == []
    with pytest.raises(tq.NotReadyError, match=rf"no field to read of its 1 rows in '{partition}'"):
        client.get_data(unnamed)
    assert hint in caplog.text
    caplog.clear()
    monkeypatch.setattr("transfer_queue.client.fetches._PATIENCE_S", 0.1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.get_meta, ["tokns"], 1, partition, task_name="t", timeout=100)
        wait_until(lambda: "task 't' has waited" in caplog.text, "the wait is told")
        assert hint in caplog.text
        tq.kv_put("a", partition, {"tokns": torch.ones(2)})
        assert waiting.result(60).size == 1


def test_a_fetch_that_waits_says_once_what_it_waits_for(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"x": torch.ones(2)}, [2]))
    tq.kv_put("a", partition, {"y": torch.ones(1)})
    client = tq.get_client()
    monkeypatch.setattr("transfer_queue.client.fetches._PATIENCE_S", 0.1)
    with pytest.raises(WaitTimeoutError):
        client.get_meta(["x", "y"], 9, partition, task_name="t", timeout=2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(
        f"for rows: it asks for 9 rows, and partition {partition!r} has 2, 'y' is missing on 1 of them"
    )


def test_polls_for_a_misspelt_field_say_so_once(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tq.kv_put("a", partition, {"tokens": torch.ones(2)})

    def poll() -> bool:
        assert tq.get_client().get_meta(["tokns"], 1, partition, task_name="z", timeout=0).size == 0
        return bool(caplog.records)

    assert [poll(), poll()] == [False, False]
    monkeypatch.setattr("transfer_queue.client.fetches._PATIENCE_S", 0.05)
    wait_until(poll, "the polls are told of")
    hint = f"no row of partition {partition!r} has the fields ['tokns'], but ['tokens']; did you mean 'tokens'?"
    assert [record.getMessage() for record in caplog.records] == [f"task 'z' polls and gets no rows: {hint}"]
    monkeypatch.setattr("transfer_queue.client.fetches._PATIENCE_S", 0.0)
    poll()
    assert len(caplog.records) == 1


def test_calls_about_names_that_do_not_exist_say_so_once(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = tq.get_client()
    tq.kv_put("a", f"{partition}-rows", {"x": torch.ones(2)})
    client.get_meta(["x"], 1, f"{partition}-rows", task_name="train")
    about: list[tuple[Callable[[str], object], str]] = [
        (lambda name: tq.kv_list(name), "kv_list"),
        (lambda name: tq.kv_clear("a", name), "kv_clear"),
        (client.clear_partition, "clear_partition"),
        (client.reset_consumption, "reset_consumption"),
        (lambda name: client.check_production_status(["x"], name), "production status"),
        (lambda name: client.check_consumption_status("train", name), "consumption status"),
        (client.check_production_completed, "check_production_completed"),
        (lambda name: client.check_stream_drained("train", name), "check_stream_drained"),
    ]
    absent = f"{partition}-rosw"
    for call, name in about:
        caplog.clear()
        call(absent)
        (told,) = [record.getMessage() for record in caplog.records]
        assert told.startswith(f"{name}: there is no partition '{absent}' now; the queue has ["), told
        assert told.endswith(f"; did you mean '{partition}-rows'?"), told
        call(absent)
        call(f"{absent}7")  # a program that asks for every step is told once
        assert len(caplog.records) == 1
    there = f"{partition}-rows"
    fields = f"no row of partition '{there}' has the fields ['y'], but ['x']"
    task = f"no task 'trian' has taken rows of partition '{there}', but ['train']; did you mean 'train'?"
    for call, text in (
        (lambda name: client.get_production_status(["y"], name), f"production status: {fields}"),
        (lambda name: client.get_consumption_status("trian", name), f"consumption status: {task}"),
        (lambda name: client.reset_consumption(name, "trian"), f"reset_consumption: {task}"),
        (lambda name: client.check_stream_drained("trian", name), f"check_stream_drained: {task}"),
        (
            lambda name: tq.kv_clear(["b", "c"], name),
            f"kv_clear: 2 of the 2 keys ['b', 'c'] are not in partition '{there}'",
        ),
        (
            lambda name: client.run(client.kv.retrieve_meta, ["a", "b"], name, False, False),
            "kv_retrieve_meta: 1 of the 2 keys ['a', 'b'] are",
        ),
    ):
        caplog.clear()
        call(there)
        (told,) = [record.getMessage() for record in caplog.records]
        assert told.startswith(text), told
    caplog.clear()
    with pytest.raises(tq.KeyNotFoundError, match=r"\['b'\]"):
        client.kv_retrieve_meta(["a", "b"], there)
    assert tq.kv_list(there) == {there: {"a": {}}}
    assert client.reset_consumption(there, "train")
    assert not client.reset_consumption(there, "trian")
    tq.kv_clear("a", there)
    assert not caplog.records


def test_a_put_to_rows_of_another_partition_is_refused(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    metadata = client.put(rows(2), partition_id=partition)
    with pytest.raises(tq.InvalidInputError, match=rf"partition_id 'other' is not where .*'{partition}'"):
        client.put(rows(2), metadata, "other")
    assert client.put(rows(2), metadata, partition).size == 2


def test_a_cancelled_fetch_consumes_nothing(queue: Stack, partition: str) -> None:
    client = tq.get_client()

    async def give_up() -> None:
        fetch = asyncio.create_task(client.async_get_meta(["x"], 2, partition, task_name="t", timeout=60))
        await asyncio.to_thread(wait_until, lambda: waiting(queue) == 1, "the fetch is parked")
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch

    asyncio.run(give_up())
    wait_until(lambda: waiting(queue) == 0, "the fetch is forgotten")
    client.put(rows(2), partition_id=partition)
    assert client.get_meta(["x"], 2, partition, task_name="t").size == 2


def test_waiting_consumers_do_not_slow_a_third(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    client.put(rows(4), partition_id=partition + "busy")

    def median() -> float:
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            client.get_partition_list()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    alone = median()
    with ThreadPoolExecutor(2) as pool:
        fetches: list[Future[Any]] = [
            pool.submit(client.get_meta, ["x"], 8, partition, task_name=f"t{n}", timeout=60) for n in range(2)
        ]
        wait_until(lambda: waiting(queue) == 2, "both are parked")
        beside = median()
        client.put(rows(8), partition_id=partition)
        assert [fetch.result(20).size for fetch in fetches] == [8, 8]
    assert beside < 3 * alone  # a wait that occupied the controller would cost tens of times as much


def test_polling_mode_answers_at_once_with_an_empty_batch() -> None:
    with running_stack(units=1, pollingMode=True) as stack:
        client = tq.TransferQueueClient("poller", stack.address)
        client.put(rows(1), partition_id="p")
        assert client.get_meta(["x"], 2, "p", task_name="t", timeout=60).size == 0
        client.close()


def test_a_put_waits_for_storage_space_that_a_clear_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "60")
    with running_stack(units=1, capacity="16Mi") as stack:
        client = tq.TransferQueueClient("producer", stack.address)
        half = TensorDict({"x": torch.ones(10, 250_000)}, batch_size=[10])  # 10 MB
        first = client.put(half, partition_id="p")
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(client.put, half, partition_id="p")
            unrelated = client.put(rows(1), partition_id="q")
            assert client.get_data(unrelated)["x"].tolist() == [0]
            assert not second.done()
            client.clear_samples(first)
            assert client.get_data(second.result(30))["x"].values().sum() == 2_500_000
        client.close()


def test_without_space_in_time_a_put_is_a_capacity_error_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "0.3")
    with running_stack(units=1, capacity="16Mi") as stack:
        client = tq.TransferQueueClient("producer", stack.address)
        client.put(TensorDict({"x": torch.ones(1, 3_000_000)}, batch_size=[1]), partition_id="p")
        used = stack.used()
        with pytest.raises(RuntimeError, match="capacity"):
            client.put(TensorDict({"x": torch.ones(2, 1_000_000)}, batch_size=[2]), partition_id="q")
        assert client.get_partition_list() == ["p"]
        wait_until(lambda: stack.used() == used, "storage is as before")
        client.close()


def test_a_put_waits_for_the_sample_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "30")
    with running_stack(units=1, sampleCapacity=4) as stack:
        client = tq.TransferQueueClient("producer", stack.address)
        first = client.put(rows(4), partition_id="p")
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(client.put, rows(2, 4), partition_id="p")
            wait_until(lambda: waiting(stack) == 1, "the commit is parked")
            client.clear_samples(first[:2])
            assert client.get_data(second.result(20))["x"].tolist() == [4, 5]
        client.close()


def test_calls_proceed_while_the_caller_computes(queue: Stack, partition: str) -> None:
    """A put under way needs nothing of its caller's event loop, nor more than a share of the interpreter lock."""
    done = threading.Event()
    client = tq.get_client()
    data = TensorDict({"x": torch.ones(8, 1_000_000)}, batch_size=[8])

    async def main() -> None:
        put = asyncio.create_task(client.async_put(data, partition_id=partition))
        await asyncio.sleep(0)  # it has begun
        deadline = time.monotonic() + 30
        while not client.check_production_status(["x"], partition):  # blocks this loop all the time
            assert time.monotonic() < deadline
            sum(range(100_000))
        await put
        done.set()

    asyncio.run(main())
    assert done.is_set()
    client.clear_partition(partition)


def test_who_waits_for_a_dead_server_is_told_which_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "3")
    monkeypatch.setenv("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "3")
    with preloaded.servers(), LocalStack(default_plan(units=1, unit_capacity=1 << 20)).start() as stack:
        client = tq.TransferQueueClient("c", stack.attach_config)
        client.put(rows(1), partition_id="p")
        for server in stack.processes:
            os.kill(server.pid, signal.SIGKILL)
        dead = f"cannot reach the controller at {stack.controller_address}: "
        for call in (lambda: client.put(rows(1), partition_id="p"), lambda: client.kv_list("p")):
            caplog.clear()
            with pytest.raises(ConnectionLostError, match=re.escape(dead)):
                call()
            told = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
            assert any(dead in text and "since" in text and "until" in text for text in told), told
        client.close()


def test_waits_with_a_timeout_end_in_time_while_the_controller_is_dead() -> None:
    with preloaded.servers(), LocalStack(default_plan(units=1, unit_capacity=1 << 20)).start() as stack:
        client = tq.TransferQueueClient("c", stack.attach_config)
        controller = stack.processes[0]
        os.kill(controller.pid, signal.SIGKILL)
        dead = f"no answer within 1 s: cannot reach the controller at {stack.controller_address}: "

        async def fetch() -> None:
            await client.async_get_meta(["x"], 1, "p", task_name="t", timeout=1)

        calls = [lambda: client.get_meta(["x"], 1, "p", task_name="t", timeout=1), lambda: asyncio.run(fetch())]
        calls.append(lambda: client.run(taking, client.engine, ["k"], "p", 1.0, 30.0))
        for call in calls:
            with pytest.raises(WaitTimeoutError, match=re.escape(dead)):
                call()
        client.close()


def test_a_put_waits_for_storage_units_that_are_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with (
        preloaded.servers(),
        LocalStack(default_plan(units=1, unit_capacity=1 << 20)).start() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        client = tq.TransferQueueClient("c", stack.attach_config)
        client.put(rows(1), partition_id="p")
        os.kill(stack.processes[1].pid, signal.SIGKILL)
        put = pool.submit(client.put, rows(1), partition_id="p")
        wait_until(lambda: "waiting for" in caplog.text, "the put waits and says so")
        assert not put.done()
        stack.restart_ended()
        assert put.result(60).size == 1
        client.close()
