"""Storage units are killed under load: what they acknowledged is there when they are back."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.chaos.load import Load
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.launch.local import LocalStack, default_plan

TIMING = {"heartbeat": 0.3, "peerTimeout": 10.0, "reconnectGrace": 20.0}
"""A unit is not given up while this machine takes its time to start it anew."""
KILLS = int(os.environ.get("TQ_CHAOS_KILLS", "2"))


def restart(stack: Stack, number: int) -> None:
    unit = stack.units[number]
    unit.kill()
    unit.spawn()
    unit.wait_ready()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["process", "node"])
def test_units_killed_under_load_lose_and_double_nothing(durability: str) -> None:
    with (
        running_stack(units=2, capacity="64Mi", durability=durability, timing=TIMING) as stack,
        Load(stack.address) as load,
    ):
        for number in range(KILLS):
            wanted = len(load.delivered) + 200
            wait_until(lambda wanted=wanted: len(load.delivered) >= wanted, f"load runs before kill {number}", 120)
            restart(stack, number % 2)
        load.drain()
        print(f"{durability}: {KILLS} kills, {len(load.acknowledged)} rows acknowledged")
        assert load.errors == []
        assert load.wrong == []
        assert set(load.acknowledged) - set(load.delivered) == set()
        assert [number for number, times in Counter(load.delivered).items() if times > 1] == []


@pytest.mark.timeout(3600)
def test_units_of_tq_up_killed_under_load_lose_and_double_nothing(tmp_path: Path) -> None:
    plan = default_plan(units=2, unit_capacity=64 << 20)
    units = tuple(unit.model_copy(update={"durability": "process"}) for unit in plan.units)
    controller = plan.controller.model_copy(update={"durability": "process"})
    plan = replace(plan, controller=controller, units=units).with_folders(tmp_path / "journal", tmp_path)
    with LocalStack(plan, tmp_path / "logs").start() as stack, Load(stack.controller_address) as load:
        for number in range(KILLS):
            wanted = len(load.delivered) + 200
            wait_until(
                lambda wanted=wanted: stack.restart_ended() or len(load.delivered) >= wanted,
                f"load runs before {number}",
                120,
            )
            os.kill(stack.processes[1 + number % 2].pid, signal.SIGKILL)
        wait_until(stack.failure, "the last one is dead")
        wait_until(lambda: stack.restart_ended() or stack.failure() is None, "all run", 120)
        load.drain()
        assert load.errors == []
        assert load.wrong == []
        assert set(load.acknowledged) - set(load.delivered) == set()
        assert [number for number, times in Counter(load.delivered).items() if times > 1] == []


@pytest.mark.parametrize("width", [100, 100_000], ids=["inline", "shared memory"])
def test_rows_outlive_the_whole_stack(width: int) -> None:
    data = TensorDict({"x": torch.arange(2 * width).view(2, width)}, batch_size=[2])
    with running_stack(units=2, capacity="64Mi", durability="process") as stack:
        client = tq.TransferQueueClient("tester", stack.address)
        metas = [client.put(data, partition_id="p") for _ in range(6)]
        for process in [*stack.units, stack.controller]:
            process.kill()
        stack.restart_controller()
        for unit in stack.units:
            unit.spawn()
        for unit in stack.units:
            unit.wait_ready()
        for meta in metas:
            assert torch.equal(client.get_data(meta)["x"].values().view(2, width), data["x"])
        client.clear_partition("p")
        wait_until(lambda: stack.used() == 0, "nothing is stored")
        client.close()


def test_a_block_whose_rows_were_cleared_while_its_unit_was_dead_is_freed() -> None:
    with running_stack(units=1, capacity="64Mi", durability="process") as stack:
        client = tq.TransferQueueClient("tester", stack.address)
        data = TensorDict({"x": torch.zeros(2, 100_000)}, batch_size=[2])
        client.put(data, partition_id="p")
        assert stack.used() > 0
        stack.units[0].kill()
        client.clear_partition("p")  # the unit cannot hear of it
        stack.units[0].spawn()
        stack.units[0].wait_ready()
        wait_until(lambda: stack.used() == 0, "the block without rows is freed")
        client.close()
