"""Emptying storage units while rows are put, read and cleared."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.cli.connection import ControllerConnection
from transfer_queue.config.attach import AttachConfig, ControllerAddresses

PARTITION = "p"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A module of the library as a process."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def run_drain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("transfer_queue.cli", "drain", *arguments)


@pytest.fixture(params=["none", "process"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running_stack(units=3, capacity="64Mi", durability=request.param) as running:
        yield running


@pytest.fixture
def attached(stack: Stack) -> Iterator[Stack]:
    tq.init({"controller": {"addresses": [stack.address]}})
    yield stack
    tq.close()


def rows(number: int, count: int, width: int) -> tuple[list[str], torch.Tensor]:
    values = torch.arange(count * width, dtype=torch.int64).reshape(count, width) + number * 1_000_003
    return [f"{number}/{row}" for row in range(count)], values


class Load(threading.Thread):
    """Puts batches, reads them all again and again, clears every third one."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.failure: BaseException | None = None
        self.kept: dict[int, tuple[list[str], torch.Tensor]] = {}
        self.rounds = 0

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self.one_round()
        except BaseException as error:  # noqa: BLE001  the test's thread raises it
            self.failure = error

    def one_round(self) -> None:
        number = self.rounds
        keys, values = rows(number, 16, 64 if number % 2 else 8192)
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict({"x": values}, batch_size=[16]))
        if number % 3:
            self.kept[number] = keys, values
        else:
            tq.kv_clear(keys=keys, partition_id=PARTITION)
        if len(self.kept) > 24:
            first = next(iter(self.kept))
            tq.kv_clear(keys=self.kept.pop(first)[0], partition_id=PARTITION)
        self.check()
        self.rounds += 1

    def check(self) -> None:
        for keys, values in list(self.kept.values()):
            found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["x"])["x"]
            assert torch.equal(torch.stack(list(found)), values)

    def wait_for_rounds(self, count: int) -> None:
        target = self.rounds + count
        wait_until(lambda: self.failure or self.rounds >= target, f"{count} rounds of load", 120)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def load(attached: Stack) -> Iterator[Load]:
    thread = Load()
    thread.start()
    yield thread
    thread.stopped.set()
    thread.join()


def units(stack: Stack) -> dict[str, dict[str, object]]:
    with ControllerConnection(AttachConfig(controller=ControllerAddresses(addresses=[stack.address]))) as link:
        return {unit["name"]: unit for unit in link.look()["units"]}


def test_a_unit_is_drained_under_load_and_nobody_misses_a_row(attached: Stack, load: Load) -> None:
    durable = attached.controller.path.read_text().count('"process"') > 0
    load.wait_for_rounds(12)
    assert attached.units[1].metric("tq_unit_used_bytes") > 0
    done = run_drain("u1", "--controller", attached.address)
    assert done.returncode == 0, done.stderr
    assert "u1 is empty" in done.stderr
    # Blocks that views of readers still hold go with the views.
    wait_until(lambda: attached.units[1].metric("tq_unit_blocks") == 0, "the unit holds no blocks", 60)
    assert units(attached)["u1"]["draining"]
    load.wait_for_rounds(3)
    assert attached.units[1].metric("tq_unit_blocks") == 0
    attached.units[1].stop()
    wait_until(lambda: set(units(attached)) == {"u0", "u2"}, "the unit is forgotten at once", 60)
    load.wait_for_rounds(3)
    if durable:
        attached.controller.kill()
        attached.restart_controller()
    load.wait_for_rounds(3)
    load.stopped.set()
    load.join()
    assert load.failure is None
    load.check()


def test_the_hook_of_a_unit_empties_it_and_it_may_come_back(attached: Stack) -> None:
    keys, values = rows(1, 64, 4096)
    for row, key in enumerate(keys):
        tq.kv_put(key=key, partition_id=PARTITION, fields={"x": values[row]})
    unit = attached.units[2]
    hook = run("transfer_queue.client.draining", "--config", str(unit.path))
    assert hook.returncode == 0, hook.stderr
    assert "u2 is empty" in hook.stderr
    unit.stop()
    unit.spawn()
    unit.wait_ready()
    assert not units(attached)["u2"]["draining"]
    found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["x"])["x"]
    assert torch.equal(torch.stack(list(found)), values)


def test_the_hook_of_a_unit_without_blocks_does_not_wait_for_a_controller_that_is_gone() -> None:
    with running_stack(units=1) as stack:
        unit = stack.units[0]
        path = stack.folder / "hook.json"
        metrics = int(unit.ready["metrics"].rpartition(":")[2])
        path.write_text(json.dumps({**json.loads(unit.path.read_text()), "metricsPort": metrics}))
        stack.controller.kill()
        hook = run("transfer_queue.client.draining", "--config", str(path))
        assert hook.returncode == 1
        assert "u0 holds nothing, and its controllers do not answer" in hook.stderr


def test_a_drain_without_room_says_so_and_goes_on_once_rows_are_cleared() -> None:
    with running_stack(units=2, capacity="16Mi") as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        try:
            keys = [str(number) for number in range(24)]
            for key in keys:
                tq.kv_put(key=key, partition_id=PARTITION, fields={"x": torch.zeros(2**20, dtype=torch.uint8)})
            refused = run_drain("u0", "--timeout", "0.5", "--controller", stack.address)
            assert refused.returncode == 1
            assert "have no room; clear rows or add storage units" in " ".join(refused.stderr.split())
            tq.kv_clear(keys=keys[4:], partition_id=PARTITION)
            done = run_drain("u0", "--controller", stack.address)
            assert done.returncode == 0, done.stderr
            assert len(tq.kv_batch_get(keys=keys[:4], partition_id=PARTITION)["x"]) == 4
            again = run_drain("u0", "--cancel", "--controller", stack.address)
            assert again.returncode == 0, again.stderr
            assert not units(stack)["u0"]["draining"]
        finally:
            tq.close()


def test_the_last_unit_is_not_drained() -> None:
    with running_stack(units=1, capacity="16Mi") as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        try:
            tq.kv_put(key="a", partition_id=PARTITION, fields={"x": torch.zeros(4)})
            refused = run_drain("u0", "--controller", stack.address)
            assert refused.returncode == 1
            assert "no other unit takes blocks" in " ".join(refused.stderr.split())
            unknown = run_drain("nobody", "--controller", stack.address)
            assert unknown.returncode == 1
            assert "there are: u0" in unknown.stderr
        finally:
            tq.close()
