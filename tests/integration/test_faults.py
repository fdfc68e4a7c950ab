"""Processes that are killed, stopped or restarted: what the others see, and that nothing leaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
import transfer_queue.errors
from tests import preloaded
from tests.integration.stack import ROOT, Process, Stack, running_stack
from tests.waiting import wait_until


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack(units=2, capacity="64Mi") as running:
        yield running


def rows(count: int, width: int = 1000) -> TensorDict:
    return TensorDict({"x": torch.arange(count * width).view(count, width)}, batch_size=[count])


def start_client(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return preloaded.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, env=environ)


PUTTER = """
import os, sys, torch, transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.client.session import ControllerSession
from transfer_queue.control.commands import Commit
real = ControllerSession.request
async def never_commits(self, command, timeout_s, **options):
    if isinstance(command, Commit) and command.partition == "half":
        print("stored", flush=True)
        import asyncio
        await asyncio.sleep(3600)
    return await real(self, command, timeout_s, **options)
ControllerSession.request = never_commits
client = tq.TransferQueueClient("victim", sys.argv[1])
data = TensorDict({"x": torch.ones(4, int(sys.argv[2]))}, batch_size=[4])
client.put(data, partition_id="whole")
client.put(data, partition_id="half")
"""


STALLED = """
import asyncio, sys, torch, transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.client.session import ControllerSession
from transfer_queue.control.commands import Commit
real = ControllerSession.request
async def late(self, command, timeout_s, **options):
    if isinstance(command, Commit):
        print("stored", flush=True)
        await asyncio.sleep(0.5)
    return await real(self, command, timeout_s, **options)
ControllerSession.request = late
client = tq.TransferQueueClient("stalled", sys.argv[1])
client.put(TensorDict({"x": torch.ones(4, int(sys.argv[2]))}, batch_size=[4]), partition_id="late")
print("put", flush=True)
"""


@pytest.mark.parametrize("width", [100, 200_000], ids=["inline", "shared memory"])
def test_a_client_stalled_between_store_and_commit_until_it_was_given_up_puts_again(
    stack: Stack, client: tq.TransferQueueClient, width: int
) -> None:
    with start_client(STALLED, stack.address, str(width)) as stalled:
        assert stalled.stdout is not None
        assert stalled.stdout.readline() == b"stored\n"
        stalled.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: stack.used() > 0, "it has stored")
            wait_until(lambda: stack.used() == 0, "its session is over, and what it stored is freed")
        finally:
            stalled.send_signal(signal.SIGCONT)
        assert stalled.stdout.read().splitlines() == [b"stored", b"put"]
    meta = client.get_meta(["x"], 4, partition_id="late", task_name="read")
    assert client.get_data(meta)["x"].sum() == 4 * width


@pytest.mark.parametrize("width", [100, 200_000], ids=["inline", "shared memory"])
def test_a_client_killed_between_store_and_commit_leaves_storage_at_baseline(
    stack: Stack, client: tq.TransferQueueClient, width: int
) -> None:
    with start_client(PUTTER, stack.address, str(width)) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"stored\n"
        wait_until(lambda: stack.used() >= 2 * 16 * width, "both puts are stored")
        victim.kill()
    wait_until(lambda: 0 < stack.used() < 2 * 16 * width, "the uncommitted block is freed, the committed one stays")
    assert client.get_partition_list() == ["whole"]
    client.clear_partition("whole")
    wait_until(lambda: stack.used() == 0, "nothing is stored")


def test_a_client_killed_in_the_middle_of_a_copy_leaves_storage_at_baseline(
    stack: Stack, client: tq.TransferQueueClient
) -> None:
    code = """
import sys, time, torch, transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.columns.block import EncodedBlock
def slow(self, target):
    print("copying", flush=True)
    time.sleep(3600)
EncodedBlock.write_into = slow
client = tq.TransferQueueClient("victim", sys.argv[1])
client.put(TensorDict({"x": torch.ones(4, 1_000_000)}, batch_size=[4]), partition_id="p")
"""
    with start_client(code, stack.address) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"copying\n"
        assert stack.used() >= 16_000_000
        victim.send_signal(signal.SIGSTOP)
        # Its connections are dropped as silent, but it may go on copying: the memory stays its own.
        wait_until(lambda: stack.controller.metric("tq_clients_connected") == 1, "the stopped client is dropped")
        assert stack.used() >= 16_000_000
        victim.kill()
    wait_until(lambda: stack.used() == 0, "nothing is stored")


def test_a_killed_storage_unit_loses_its_rows_and_puts_go_to_the_other(
    stack: Stack, client: tq.TransferQueueClient
) -> None:
    # Large enough that each goes to the other unit than the one before.
    data = TensorDict({"x": torch.arange(2 * 40_000.0).view(2, 40_000)}, batch_size=[2])
    first = [client.put(data, partition_id="p") for _ in range(4)]
    stack.units[0].kill()
    lost, kept = 0, 0
    for meta in first:
        try:
            got = client.get_data(meta)
        except tq.errors.DataLostError:
            lost += 1
        else:
            assert torch.equal(got["x"].values().view(2, 40_000), data["x"])
            kept += 1
    assert (lost, kept) == (2, 2)
    status = client.get_production_status(["x"], "p")[1]
    assert int(status.sum()) == 4
    for _ in range(4):
        meta = client.put(rows(2), partition_id="p")
        assert torch.equal(client.get_data(meta)["x"].values().view(2, 1000), rows(2)["x"])


def test_a_unit_that_comes_back_after_a_stop_still_has_its_rows(stack: Stack, client: tq.TransferQueueClient) -> None:
    metas = [client.put(rows(2), partition_id="p") for _ in range(4)]
    stack.units[0].process.send_signal(signal.SIGSTOP)
    wait_until(lambda: len(registered(stack)) == 1, "the stopped unit is given up")
    stack.units[0].process.send_signal(signal.SIGCONT)
    wait_until(lambda: len(registered(stack)) == 2, "it is registered again")
    for meta in metas:
        assert torch.equal(client.get_data(meta)["x"].values().view(2, 1000), rows(2)["x"])


def registered(stack: Stack) -> list[str]:
    text = stack.controller.http("/metrics")[1]
    return [line for line in text.splitlines() if line.startswith("tq_unit_capacity_bytes{")]


def test_after_a_controller_restart_units_and_clients_come_back_empty(
    stack: Stack, client: tq.TransferQueueClient
) -> None:
    client.put(rows(2), partition_id="p")
    assert stack.used() > 0
    port = int(stack.address.rsplit(":", 1)[1])
    stack.controller.kill()
    config = stack.controller.path.read_text().replace('"port": 0, "metricsPort"', f'"port": {port}, "metricsPort"')
    stack.controller.path.write_text(config)
    stack.controller.spawn()
    stack.controller.wait_ready()
    wait_until(lambda: stack.controller.http("/readyz")[0] == 200, "both units are registered again")
    wait_until(lambda: stack.used() == 0, "units freed the blocks that nobody knows")
    assert client.get_partition_list() == []
    meta = client.put(rows(2), partition_id="p")
    assert torch.equal(client.get_data(meta)["x"].values().view(2, 1000), rows(2)["x"])


def test_a_lost_controller_is_a_connection_error_that_says_what_to_do(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "0.5")
    client = tq.TransferQueueClient("tester", stack.address)
    stack.controller.kill()
    with pytest.raises(ConnectionError, match=f"{stack.address}.*check that the controller runs"):
        client.get_partition_list()
    client.close()


def test_servers_stop_on_sigterm_and_leave_no_file(stack: Stack) -> None:
    arenas = [path for unit in stack.units for path in Path("/dev/shm").glob(f"tq-{unit.name}-{unit.process.pid}-*")]
    assert len(arenas) == 2
    assert [process.stop() for process in (*stack.units, stack.controller)] == [0, 0, 0]
    assert not any(path.exists() for path in arenas)


def test_servers_end_with_their_parent(stack: Stack) -> None:
    for process in (*stack.units, stack.controller):
        assert process.process.stdin is not None
        process.process.stdin.close()
        assert process.process.wait(60) == 0


def test_readiness_counts_the_storage_units(stack: Stack) -> None:
    assert stack.controller.http("/healthz") == (200, "ok\n")
    assert stack.controller.http("/readyz") == (200, "ready\n")
    assert stack.controller.http("/else")[0] == 404
    stack.units[1].kill()
    wait_until(lambda: stack.controller.http("/readyz") == (503, "1 of 2 storage units are registered\n"), "not ready")


@pytest.mark.parametrize(
    ("module", "config", "text"),
    [
        ("controller", {"port": "USED"}, "the port is in use"),
        ("controller", {"port": 0, "metricsPort": None, "sampler": {"name": "No"}}, "Could not find sampler 'No'"),
        ("controller", {"prot": 1}, 'unknown field "prot"; did you mean port? allowed: advertiseHost'),
        (
            "storage_unit",
            {"port": 0, "controller": ["127.0.0.1:9"], "startTimeout": 0.1},
            "cannot reach the controller",
        ),
        ("storage_unit", {"port": 0, "controller": ["nonsense"]}, "'nonsense' is not an address"),
        ("storage_unit", {"port": 0, "controller": ["USED"], "directory": "/nowhere"}, "/nowhere"),
    ],
    ids=["port in use", "unknown sampler", "unknown field", "no controller", "bad address", "no such directory"],
)
def test_an_expected_fault_is_one_line_and_exit_code_one(
    stack: Stack, tmp_path: Path, module: str, config: dict[str, object], text: str
) -> None:
    used = stack.address
    filled = {
        key: int(used.rsplit(":", 1)[1]) if value == "USED" else [used] if value == ["USED"] else value
        for key, value in config.items()
    }
    process = Process(f"transfer_queue.runtime.{module}", filled, tmp_path, "faulty")
    assert process.process.wait(30) == 1
    process.stop()
    lines = process.log.read_text().splitlines()
    assert len(lines) == 1
    assert text in lines[0]
