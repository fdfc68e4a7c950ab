"""A client as part of its process: threads, loops, forks, descriptors, the end of the interpreter."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import ROOT, Stack
from tests.waiting import wait_until


def run_python(code: str, stack: Stack | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("TQ_CONTROLLER_ADDRESS", None)
    if stack is not None:
        environ["TQ_CONTROLLER_ADDRESS"] = stack.address
    return preloaded.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200)


def own_errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on stderr, but for a notice of torch about its own renaming."""
    return [line for line in result.stderr.splitlines() if "is_fx_tracing" not in line]


def in_forked_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; its exit status.

    The child does not collect what earlier tests left here: engines of some backends do not survive that after a fork.
    """
    gc.collect()
    gc.freeze()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the top of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    gc.unfreeze()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_parent_and_forked_child_both_go_on(queue: Stack, partition: str) -> None:
    tq.kv_put("parent", partition, {"x": torch.ones(50_000)})

    def child() -> None:
        # numpy: torch's own thread pool does not survive a fork
        assert tq.kv_batch_get("parent", partition)["x"].values().numpy().sum() == 50_000
        tq.kv_put("child", partition, {"x": torch.zeros(10)})

    assert in_forked_child(child) == 0
    assert tq.kv_batch_get(["child", "parent"], partition)["x"].values().shape == (50_010,)


def test_a_forked_child_that_lives_on_does_not_keep_its_dead_parent_connected(queue: Stack) -> None:
    code = """
import os, sys, time, transfer_queue as tq
import torch
tq.kv_put("a", "orphan", {"x": torch.ones(100_000)})
if os.fork() == 0:
    sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)
    time.sleep(30)
os._exit(0)
"""
    before = queue.controller.metric("tq_clients_connected")
    assert run_python(code, queue).returncode == 0
    wait_until(lambda: queue.controller.metric("tq_clients_connected") == before, "the parent counts as gone")


def test_two_thousand_calls_open_no_descriptors(queue: Stack, partition: str) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    for number in range(20):
        tq.kv_put(f"k{number}", partition, {"x": torch.ones(4)})
        tq.kv_batch_get(f"k{number}", partition)
    before = count()
    for number in range(1000):
        tq.kv_put(f"k{number % 20}", partition, {"x": torch.ones(4)})
        tq.kv_batch_get(f"k{number % 20}", partition)
    assert count() <= before


def test_any_number_of_clients_has_two_threads(queue: Stack, partition: str) -> None:
    def own() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("tq-")}

    before = own()  # other tests in this process may have used Ray's tensor transport, which has its own
    others = [tq.TransferQueueClient(f"extra{number}", queue.address) for number in range(3)]
    for client in others:
        meta = client.put(TensorDict({"x": torch.ones(4, 1_000_000)}, batch_size=[4]), partition_id=partition)
        assert asyncio.run(client.async_get_data(meta))["x"].values().sum() == 4_000_000
        client.close()
    assert len(own() - before) <= 2
    tq.get_client().clear_partition(partition)


def test_one_client_serves_many_loops_and_threads_at_once(queue: Stack, partition: str) -> None:
    async def work(number: int) -> int:
        await tq.async_kv_put(f"k{number}", partition, {"x": torch.tensor(number)})
        got = await tq.async_kv_batch_get(f"k{number}", partition)
        return int(got["x"][0])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: asyncio.run(work(number)), range(40)))
    assert results == list(range(40))


def test_blocking_calls_work_inside_a_running_loop(queue: Stack, partition: str) -> None:
    async def main() -> float:
        tq.kv_put("a", partition, {"x": torch.tensor(2.5)})
        return float(tq.kv_batch_get("a", partition)["x"][0])

    assert asyncio.run(main()) == 2.5


def test_a_process_that_forgets_to_close_ends_cleanly(queue: Stack) -> None:
    code = """
import torch, transfer_queue as tq
tq.kv_put("a", "forgetful", {"x": torch.ones(100_000)})
assert tq.kv_batch_get("a", "forgetful")["x"].values().sum() == 100_000
"""
    result = run_python(code, queue)
    assert (result.returncode, result.stdout, own_errors(result)) == (0, "", [])


def test_without_a_queue_every_call_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    monkeypatch.delenv("TQ_CONFIG_FILE", raising=False)
    with pytest.raises(AssertionError, match=r"tq\.init\(\)"):
        tq.get_client()
    with pytest.raises(AssertionError, match="has not been initialized"):
        tq.kv_list()


def test_close_is_idempotent_and_a_closed_client_says_so(queue: Stack) -> None:
    client = tq.TransferQueueClient("short", queue.address)
    client.close()
    client.close()
    with pytest.raises(tq.TransferQueueError, match="closed"):
        client.get_partition_list()


def test_a_second_init_warns_of_what_it_ignores(queue: Stack) -> None:
    with pytest.warns(UserWarning, match="layout"):
        tq.init({"layout": "dense"})


def test_a_further_init_names_each_setting_that_differs(queue: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import warnings, transfer_queue as tq
conf = tq.init({"controller": {"sampler": "GRPOGroupNSampler"}})  # of the queue, which has another one
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    tq.init()
    tq.init(conf)
    assert not said, said[0].message
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 7}}, "layout": "jagged"})
print(*(warning.message for warning in said))
"""
    result = run_python(code, queue)
    assert "backend.SimpleStorage.num_data_storage_units: 7 (in effect: 'not set')" in result.stdout, result.stderr
    assert "layout" not in result.stdout
    (line,) = own_errors(result)
    assert "SequentialSampler" in line
    assert "not with GRPOGroupNSampler of conf" in line


def test_init_after_the_end_of_the_queue_starts_another_one() -> None:
    code = """
import os, signal, time, psutil, torch, transfer_queue as tq
conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 1, "unit_capacity": "32Mi"}}}
tq.init(conf)
before = os.environ["TQ_CONFIG_FILE"]
(controller,) = (each for each in psutil.Process().children() if "transfer_queue.runtime.controller" in each.cmdline())
controller.kill()
try:
    tq.kv_put("a", "p", {"x": torch.ones(3)})
except ConnectionError as error:
    print(error)
tq.init(conf)
assert os.environ["TQ_CONFIG_FILE"] != before
tq.kv_put("a", "p", {"x": torch.ones(3)})
assert len(psutil.Process().children()) == 2, psutil.Process().children()
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "killed by SIGKILL" in result.stdout
    assert "call transfer_queue.init() for a new, empty one" in result.stdout
    started, ended, again = own_errors(result)
    assert "started a queue" in started
    assert "started a queue" in again
    assert "has ended" in ended
    assert "init() looks for a queue again" in ended


def test_storage_units_of_init_that_end_are_started_again_and_it_is_said() -> None:
    code = """
import psutil, torch, transfer_queue as tq
tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2, "unit_capacity": "32Mi"}}})
tq.kv_put("a", "p", {"x": torch.ones(3)})
for each in psutil.Process().children():
    if "transfer_queue.runtime.storage_unit" in each.cmdline():
        each.kill()
tq.kv_put("b", "p", {"x": torch.ones(3)})
print(tq.kv_batch_get("b", "p", layout="dense")["x"].shape)
try:
    tq.kv_batch_get("a", "p")
except tq.DataLostError as error:
    print(error)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 3])" in result.stdout
    assert "were lost with their storage unit" in result.stdout
    for unit in ("storage-0", "storage-1"):
        assert f"{unit} ended: killed by SIGKILL" in result.stderr
    assert "it is restarted now, without its rows, which are lost" in result.stderr


def test_a_child_of_a_killed_owner_is_told_at_once_what_has_happened(tmp_path: Path) -> None:
    child = """
import os, signal, sys, transfer_queue as tq
from tests.waiting import wait_until
tq.init()
owner = os.getppid()
os.kill(owner, signal.SIGKILL)
wait_until(lambda: tq.get_client().ended, "the client knows that the queue has ended", 60)
try:
    tq.kv_list()
except ConnectionError as error:
    with open(sys.argv[1] + ".part", "w") as file:
        print(owner, error, file=file)
    os.rename(sys.argv[1] + ".part", sys.argv[1])
"""
    told = tmp_path / "told"
    code = f"""
import signal, subprocess, sys, transfer_queue as tq
tq.init({{"backend": {{"SimpleStorage": {{"num_data_storage_units": 1, "unit_capacity": "32Mi"}}}}}})
subprocess.Popen([sys.executable, "-c", {child!r}, {str(told)!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
signal.pause()
"""
    assert run_python(code).returncode == -signal.SIGKILL
    wait_until(told.exists, "the child is told", 120)
    owner, _, said = told.read_text().partition(" ")
    assert f"queue local ended: the process that started it (pid {owner}) was killed or crashed" in said


def test_wrong_arguments_of_a_blocking_call_name_that_call() -> None:
    with pytest.raises(TypeError, match=r"^kv_put\(\) got an unexpected keyword argument 'kee'"):
        tq.kv_put(kee="a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Client\.get_meta\(\) got an unexpected keyword argument 'size'"):
        tq.TransferQueueClient.get_meta(None, size=3)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("end", ["tq.close()", "controller.kill()"])
def test_init_in_a_child_starts_a_queue_after_the_end_of_its_parents(end: str) -> None:
    child = """
import os, sys, torch, transfer_queue as tq
from tests.waiting import wait_until
tq.init()
print("attached", flush=True)
sys.stdin.readline()
wait_until(lambda: tq.get_client().ended, "the client knows that the queue has ended", 60)
tq.init(CONF)
tq.kv_put("a", "p", {"x": torch.ones(3)})
"""
    code = f"""
import subprocess, sys, psutil, transfer_queue as tq
conf = {{"backend": {{"SimpleStorage": {{"num_data_storage_units": 1, "unit_capacity": "32Mi"}}}}}}
tq.init(conf)
(controller,) = (each for each in psutil.Process().children() if "transfer_queue.runtime.controller" in each.cmdline())
child = subprocess.Popen(
    [sys.executable, "-c", {child!r}.replace("CONF", repr(conf))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
assert child.stdout.readline() == b"attached\\n"
{end}
child.communicate(b"go on\\n", timeout=150)
sys.exit(child.returncode)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "init() looks for a queue again" in result.stderr
    assert result.stderr.count("started a queue of its own") == 2


def test_an_unreachable_controller_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONNECT_TIMEOUT", "0.3")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9.*TQ_CONTROLLER_ADDRESS"):
        tq.TransferQueueClient("lost", "127.0.0.1:9")


def test_init_without_a_queue_starts_one_that_ends_with_close() -> None:
    code = """
import os, subprocess, torch, transfer_queue as tq
from transfer_queue.compat.server_info import controller_address
def children():
    return subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "unit_capacity": "32Mi"}}})
assert conf.backend.storage_backend == "SimpleStorage", conf
assert os.environ["TQ_CONFIG_FILE"].endswith("attach.yaml")
print(controller_address(conf.controller.zmq_info))
tq.kv_put("a", "p", {"x": torch.ones(3), "any": object})
assert tq.kv_batch_get("a", "p")["any"][0] is object
assert "transfer_queue.runtime" in children()
manager = tq.get_client().storage_manager
assert type(manager).__name__ == "AsyncSimpleStorageManager", manager
tq.get_client().close()
tq.init()
assert tq.kv_batch_get("a", "p")["x"][0].tolist() == [1.0] * 3
tq.close()
assert "transfer_queue.runtime" not in children(), children()
assert "TQ_CONFIG_FILE" not in os.environ
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    (said,) = own_errors(result)  # one line
    assert f"started a queue of its own at {result.stdout.split()[0]}" in said
    assert "TQ_CONFIG_FILE=" in said


@pytest.mark.parametrize(
    "module",
    [
        "transfer_queue",
        "transfer_queue.runtime",
        "transfer_queue.runtime.controller",
        "transfer_queue.runtime.storage_unit",
    ],
)
def test_servers_and_a_bare_import_load_no_torch(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'tensordict', 'pickle5') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert result.stdout.strip() == "[]", result.stderr


def test_servers_end_with_a_killed_parent_though_its_forked_child_lives(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from transfer_queue.launch.local import LocalStack, default_plan\n"
        "stack = LocalStack(default_plan(units=1, unit_capacity=16 << 20), Path(sys.argv[1]))\n"
        "stack.start()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    signal.pause()\n"
        "print(child, *(server.pid for server in stack.processes), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    child, *servers = map(int, done.stdout.split())

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    try:
        assert len(servers) == 2
        wait_until(lambda: not any(map(alive, servers)), "the servers end", 60)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


DAEMON = """
import sys, threading
import transfer_queue as tq

tq.init()
client, name = tq.get_client(), "daemon-at-exit"
client.put({"y": [1]}, partition_id=name)
call = lambda: client.get_meta(["x"], 1, name, task_name="t", timeout=100)
threading.Thread(target=call, daemon=True).start()
while not client.run(client.rows.partition_counts, name)["waiting"]:
    pass
client.clear_partition(name)
print("end")
"""


def test_a_program_ends_quietly_while_a_daemon_thread_waits_for_rows(queue: Stack) -> None:
    done = run_python(DAEMON, queue)
    assert (done.returncode, done.stdout, own_errors(done)) == (0, "end\n", [])


LATE_EVENT = """
import ctypes, os
from transfer_queue.client.io import shared_io

async def read():
    shared_io().loop.add_reader(reading, lambda: None)

reading, writing = os.pipe()
shared_io().wait(read())
libc = ctypes.CDLL(None)
for name, argument in (("usleep", 100_000), ("close", writing)):  # the last comes first, after Python's own end
    libc.__cxa_atexit(ctypes.cast(getattr(libc, name), ctypes.c_void_p), ctypes.c_void_p(argument), None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="__cxa_atexit is of glibc")
def test_an_event_after_the_end_of_the_interpreter_does_no_harm() -> None:
    done = run_python(LATE_EVENT)
    assert (done.returncode, own_errors(done)) == (0, [])


LATE_CALLS = """
import asyncio, atexit

def last():
    client.put({"x": [1]}, partition_id="late")
    print(client.get_meta(["x"], 2, "late", task_name="t").size)
    print(asyncio.run(client.async_clear_partition("late")))
    client.close()

atexit.register(last)  # before the library's own: called after them
import transfer_queue as tq

client = tq.TransferQueueClient("late", ADDRESS)
client.put({"x": [1]}, partition_id="late")
"""


def test_exit_handlers_that_come_after_those_of_the_library_can_still_call(queue: Stack) -> None:
    done = run_python(LATE_CALLS.replace("ADDRESS", repr(queue.address)), queue)
    assert (done.returncode, done.stdout, own_errors(done)) == (0, "2\nNone\n", [])
