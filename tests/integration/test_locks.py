"""Locks of the queue and of a process, and updates of rows, by several processes, threads and tasks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import ROOT, Stack
from tests.waiting import until, wait_until
from transfer_queue.control.commands import RenewLock, Snapshot
from transfer_queue.errors import StorageKeyNotFoundError

pytestmark = pytest.mark.usefixtures("queue")

WORKER = """
import sys
import torch
import transfer_queue as tq

address, partition, what, count = sys.argv[1:]
tq.init({"controller": {"addresses": [address]}, "security": {"allowPickle": True}})

def locked():
    with tq.kv_global_lock("n", partition, timeout=120) as lock:
        n = tq.kv_batch_get("n", partition)["n"][0]
        tq.kv_put("n", partition, {"n": n + 1}, lock=lock)

def updated():
    tq.kv_update("n", partition, "n", torch.tensor(1), lambda old, new: old + new)

if what == "hold":
    with tq.kv_global_lock("n", partition, timeout=120) as lock:
        print(lock.number, flush=True)
        sys.stdin.read()
else:
    for _ in range(int(count)):
        {"lock": locked, "update": updated}[what]()
"""


@contextmanager
def worker(queue: Stack, partition: str, what: str, count: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER, queue.address, partition, what, str(count)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = preloaded.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def waiting() -> int:
    found: Any = tq.get_client().run(_ask, tq.get_client().engine, Snapshot(""))
    return int(found["lock_waiting"])


def _ask(engine: Any, command: Any) -> Any:
    from transfer_queue.client.operation import Operation

    return Operation(engine.request(command, 10.0), lambda reply: reply.value)


def end_at_the_controller(lock: Any) -> None:
    """The lock ends while its holder goes on."""
    assert tq.get_client().run(_ask, tq.get_client().engine, RenewLock(lock.partition_id, lock.number))


@pytest.mark.parametrize("what", ["lock", "update"])
def test_processes_that_change_one_row_lose_no_change(queue: Stack, partition: str, what: str) -> None:
    tq.kv_put("n", partition, {"n": torch.tensor(0)})
    with worker(queue, partition, what, 25) as one, worker(queue, partition, what, 25) as other:
        assert (one.wait(300), other.wait(300)) == (0, 0)
    assert int(tq.kv_batch_get("n", partition)["n"][0]) == 50


def test_the_lock_of_a_killed_process_goes_to_the_one_that_waits(queue: Stack, partition: str) -> None:
    with worker(queue, partition, "hold") as holder:
        assert holder.stdout is not None
        number = int(holder.stdout.readline())
        taken: list[int] = []

        def take() -> None:
            with tq.kv_global_lock(["n", "m"], partition, timeout=120) as lock:
                taken.extend(lock.fence.values())

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: waiting() == 1, "the second request waits", 60)
        with pytest.raises(tq.WaitTimeoutError, match="holds or waits for"), tq.kv_global_lock("n", partition, 0.01):
            pass
        holder.kill()
        thread.join(120)
    assert len(taken) == 2
    assert set(taken) == {taken[0]}
    assert taken[0] > number


def test_a_lock_outlives_its_lease_while_its_holder_lives_and_may_be_taken_again(partition: str) -> None:
    with tq.kv_global_lock("n", partition, lease_s=0.5) as lock:
        first = lock._deadline
        wait_until(lambda: lock._deadline > first + 0.5, "renewals", 60)
        lock.check()
        tq.kv_put("n", partition, {"n": torch.tensor(1)}, lock=lock)
    with tq.kv_global_lock("n", partition, timeout=10) as again:
        assert again.number > lock.number


def test_a_holder_whose_lock_has_ended_puts_nothing(partition: str) -> None:

    def lose(error: Exception | None = None) -> None:
        with tq.kv_global_lock("n", partition, lease_s=300) as lock:
            end_at_the_controller(lock)
            with pytest.raises(tq.LockLostError, match=f"lock {lock.number} of partition"):
                tq.kv_batch_put(["n"], partition, tags=[{"n": 1}], lock=lock)
            lock._ended = True  # what the next renewal finds
            if error is not None:
                raise error

    with pytest.raises(tq.LockLostError):
        lose()
    with pytest.raises(ValueError, match="body"):
        lose(ValueError("body"))  # is not hidden by the loss
    assert tq.kv_list(partition) == {}


def test_a_put_with_the_lock_of_another_partition_or_with_something_else_is_refused(partition: str) -> None:
    with tq.kv_global_lock("n", partition) as lock, pytest.raises(tq.InvalidInputError, match="cannot guard"):
        tq.kv_put("n", f"{partition}-other", tag={"n": 1}, lock=lock)
    with tq.kv_global_lock("n", partition) as lock, pytest.raises(tq.InvalidInputError, match=r"\['n'\].*\['m'\]"):
        tq.kv_batch_put(["n", "m"], partition, tags=[{}, {}], lock=lock)
    wrong: Any = 7
    with pytest.raises(tq.InvalidTypeError, match="kv_global_lock"):
        tq.kv_put("n", partition, tag={"n": 1}, lock=wrong)


def test_a_cancelled_task_neither_waits_nor_holds(partition: str) -> None:
    async def take() -> None:
        async with tq.async_kv_global_lock("n", partition):
            raise AssertionError("not free")

    async def cancel() -> None:
        task = asyncio.create_task(take())
        await until(lambda: waiting() == 1, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with tq.kv_global_lock("n", partition):
        thread = threading.Thread(target=asyncio.run, args=(cancel(),))
        thread.start()
        thread.join(60)
        wait_until(lambda: waiting() == 0, "the cancelled request is forgotten", 60)
    with tq.kv_global_lock("n", partition, timeout=10):
        pass


def test_locks_within_locks_and_blocking_calls_in_a_loop_are_refused(partition: str) -> None:
    with tq.kv_global_lock("a", partition):
        with pytest.raises(tq.RequestError, match="Nested kv_global_lock"), tq.kv_global_lock("b", partition):
            pass
        with tq.kv_local_lock("a", partition):
            pass
    with pytest.raises(tq.InvalidInputError), tq.kv_global_lock([], partition):
        pass

    async def block() -> None:
        with pytest.raises(tq.RequestError, match="use async_kv_global_lock"), tq.kv_global_lock("a", partition):
            pass
        async with tq.async_kv_global_lock(["a", "b"], partition) as lock:
            await tq.async_kv_put("a", partition, tag={"n": 1}, lock=lock)

    asyncio.run(block())


# ------------------------------------------------------------------------------------------------------------- update


def test_an_update_gets_the_old_values_and_writes_the_named_fields_alone() -> None:
    partition = uuid.uuid4().hex
    fields = {"ids": torch.tensor([1, 2]), "stats": {"step": 1}, "other": torch.ones(3)}
    tq.kv_put("a", partition, fields, tag={"n": 1})
    seen: list[Any] = []

    def join(old: Any, new: Any) -> Any:
        seen.append(old)
        return {**old, **new} if isinstance(new, dict) else torch.cat([old, new])

    values = {"ids": torch.tensor([3]), "stats": {"reward": 0.5}}
    meta = tq.kv_update("a", partition, ["ids", "stats"], values, join)
    assert (meta.keys, meta.fields) == (["a"], ["ids", "other", "stats"])
    row = tq.kv_batch_get("a", partition)
    assert row["ids"][0].tolist() == [1, 2, 3]
    assert row["stats"][0] == {"step": 1, "reward": 0.5}
    assert row["other"][0].tolist() == [1, 1, 1]
    assert seen[0].tolist() == [1, 2]
    asyncio.run(tq.async_kv_update("a", partition, "new", 5, lambda old, new: [old, new]))
    assert tq.kv_batch_get("a", partition, "new")["new"][0] == [None, 5]


def test_a_put_between_read_and_write_of_an_update_is_not_overwritten(partition: str) -> None:
    tq.kv_put("a", partition, {"n": torch.tensor(1), "m": torch.tensor(1)})
    calls: list[int] = []

    def add(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        calls.append(int(old))
        if len(calls) == 1:
            tq.kv_put("a", partition, {"n": torch.tensor(10)})
        elif len(calls) == 2:
            tq.kv_put("a", partition, {"m": torch.tensor(7)})  # another field: no matter
        return old + new

    tq.kv_update("a", partition, "n", torch.tensor(1), add)
    assert calls == [1, 10]
    row = tq.kv_batch_get("a", partition)
    assert (int(row["n"][0]), int(row["m"][0])) == (11, 7)


def test_an_update_that_fails_changes_nothing(partition: str) -> None:
    tq.kv_put("a", partition, {"n": torch.tensor(1)})

    def fail(old: Any, new: Any) -> Any:
        raise ZeroDivisionError

    wrong: list[tuple[type[Exception], tuple[Any, ...]]] = [
        (ZeroDivisionError, ("a", partition, "n", 1, fail)),
        (tq.KeyNotFoundError, ("b", partition, "n", 1, max)),
        (tq.InvalidTypeError, ("a", partition, "n", 1)),
        (tq.InvalidInputError, ("a", partition, "n", None, max)),
        (tq.InvalidInputError, ("a", partition, ["n", "m"], {"n": 1}, max)),
        (tq.InvalidInputError, ("a", partition, ["n", "m"], {"n": 1, "m": 1}, lambda old, new: print(new))),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            tq.kv_update(*arguments)
    assert tq.kv_list(partition) == {partition: {"a": {}}}
    assert int(tq.kv_batch_get("a", partition)["n"][0]) == 1


# -------------------------------------------------------------------------------------------------- within one process


def test_threads_and_tasks_of_a_process_exclude_each_other_in_order(partition: str) -> None:
    order: list[int] = []
    inside: list[int] = []

    def hold(number: int) -> None:
        with tq.kv_local_lock(["a", "b"], partition, timeout=60):
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.remove(number)

    async def hold_in_task(number: int) -> None:
        async with tq.async_kv_local_lock("b", partition, timeout=60):
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.remove(number)

    threads = []
    with tq.kv_local_lock("b", partition):
        for number in range(6):
            targets: Any = (lambda n=number: asyncio.run(hold_in_task(n))) if number % 2 else (lambda n=number: hold(n))
            threads.append(threading.Thread(target=targets))
            threads[-1].start()
            wait_until(lambda n=number: _local_waiting(partition) == n + 1, "it waits", 60)
        with pytest.raises(tq.RequestError, match="Nested kv_local_lock"), tq.kv_local_lock("c", partition):
            pass
    for thread in threads:
        thread.join(60)
    assert order == list(range(6))


def _local_waiting(partition: str) -> int:
    from transfer_queue.client import local_locks

    return len(local_locks._locks._lines._lines.get((partition, "b"), {})) - 1


def test_a_local_lock_times_out_and_locked_calls_get_keys_and_partition(partition: str) -> None:
    async def try_it() -> None:
        with pytest.raises(TimeoutError):
            async with tq.async_kv_local_lock("a", partition, timeout=0.01):
                pass

    def try_blocking() -> None:
        with pytest.raises(TimeoutError), tq.kv_local_lock("a", partition, timeout=0.01):
            pass
        asyncio.run(try_it())

    failures: list[BaseException] = []
    with tq.kv_local_lock("a", partition):
        thread = threading.Thread(target=lambda: _collect(try_blocking, failures))
        thread.start()
        thread.join(60)
    assert failures == []
    meta = tq.kv_local_locked(tq.kv_batch_put, ["a"], partition, tags=[{"n": 1}], lock_timeout=10)
    assert meta.tags == [{"n": 1}]
    listed = asyncio.run(tq.async_kv_local_locked(_listed, "a", partition))
    assert listed == ("a", {partition: {"a": {"n": 1}}})
    with pytest.raises(tq.InvalidTypeError, match="async_kv_local_locked"):
        tq.kv_local_locked(_listed, "a", partition)
    with pytest.raises(tq.InvalidTypeError, match="coroutine function"):
        asyncio.run(tq.async_kv_local_locked(tq.kv_clear, "a", partition))


async def _listed(keys: str, partition_id: str) -> tuple[str, Any]:
    return keys, await tq.async_kv_list(partition_id)


def _collect(call: Any, failures: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised in the test's thread
        failures.append(error)


def test_what_a_parser_raises_ends_the_update(queue: Stack) -> None:
    partition = f"p-{uuid.uuid4().hex}"
    tq.kv_put("n", partition, {"n": torch.tensor(1)})
    error = StorageKeyNotFoundError("of a row that the parser read")

    def parser(old: Any, new: Any) -> Any:
        raise error

    with pytest.raises(StorageKeyNotFoundError) as caught:
        tq.kv_update("n", partition, "n", torch.tensor(1), parser)
    assert caught.value is error


def test_calls_in_a_loop_that_a_parser_runs_go_on_side_by_side(queue: Stack) -> None:
    """One waits for the row that the other puts."""
    partition = f"p-{uuid.uuid4().hex}"
    tq.kv_put("n", partition, {"n": torch.tensor(1)})

    async def both() -> int:
        client = tq.get_client()
        waiting = asyncio.create_task(client.async_get_meta(["x"], 1, f"{partition}-x", task_name="t", timeout=60))
        await asyncio.sleep(0)
        await tq.async_kv_put("k", f"{partition}-x", {"x": torch.tensor(1)})
        return len((await waiting).global_indexes)

    tq.kv_update("n", partition, "n", torch.tensor(1), lambda old, new: old + asyncio.run(both()))
    assert int(tq.kv_batch_get("n", partition)["n"][0]) == 2


FORK = """
import os, sys
import transfer_queue as tq

tq.init({"controller": {"addresses": [sys.argv[1]]}})
with tq.kv_global_lock("k", sys.argv[2], timeout=60) as lock:
    child = os.fork()
    if not child:
        sys.exit(7)  # unwinds the block
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    lock.check()
"""


def test_a_forked_child_that_leaves_the_block_gives_nothing_back(queue: Stack) -> None:
    command = [sys.executable, "-c", FORK, queue.address, f"p-{uuid.uuid4().hex}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = preloaded.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
