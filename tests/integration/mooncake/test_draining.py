"""A storage unit whose rows are moved to the others before it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import ROOT, Process, Stack, running_stack
from tests.integration.test_draining import run_drain, units
from tests.waiting import wait_until
from transfer_queue.storage.mooncake.testing import servers

PARTITION = "p"


def test_a_drained_unit_may_end_and_its_rows_are_read_from_the_others(tmp_path: Path) -> None:
    with servers(tmp_path) as settings:
        backend = {"kind": "mooncake", "settings": settings}
        with running_stack(units=3, capacity="64Mi", backend=backend) as stack:
            tq.init({"controller": {"addresses": [stack.address]}})
            try:
                values = torch.arange(48 * 8192, dtype=torch.int64).reshape(48, 8192)
                keys = [str(row) for row in range(48)]
                for start in range(0, 48, 4):  # blocks of 256 KiB, on each unit some
                    rows = slice(start, start + 4)
                    fields = TensorDict({"x": values[rows]}, batch_size=[4])
                    tq.kv_batch_put(keys=keys[rows], partition_id=PARTITION, fields=fields)
                done = run_drain("u1", "--controller", stack.address)
                assert done.returncode == 0, done.stderr
                assert "u1 is empty" in done.stderr
                assert units(stack)["u1"]["draining"]
                metrics = stack.controller.http("/metrics")[1].splitlines()
                assert 'tq_unit_drained{unit="u1"} 1.0' in metrics, "the operator may remove it"
                assert 'tq_unit_drained{unit="u0"} 0.0' in metrics
                stack.units[1].stop()
                found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["x"])["x"]
                assert torch.equal(torch.stack(list(found)), values)
            finally:
                tq.close()


def holder(stack: Stack) -> Process | None:
    used = {name: unit["used"] for name, unit in units(stack).items()}
    return next((unit for unit in stack.units if used[unit.name]), None)


HOOK = """
import sys
from transfer_queue.client.draining import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def test_the_hook_of_a_pod_moves_a_block_larger_than_the_memory_that_it_takes(tmp_path: Path) -> None:
    with servers(tmp_path) as settings:
        backend = {"kind": "mooncake", "settings": settings}
        with running_stack(units=2, capacity="640Mi", backend=backend) as stack:
            tq.init({"controller": {"addresses": [stack.address]}})
            try:
                values = torch.arange(64 << 20, dtype=torch.int32).reshape(64, 1 << 20)
                keys = [str(row) for row in range(64)]
                tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict({"x": values}, batch_size=[64]))
                leaving = wait_until(lambda: holder(stack), "a unit says that it has the block")
                command = [sys.executable, "-c", HOOK, "--config", str(leaving.path)]
                done = subprocess.run(
                    command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr
                assert f"{leaving.name} is empty: 1 blocks" in done.stderr
                assert int(done.stdout.split()[1]) << 10 < values.nbytes
                leaving.stop()
                found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["x"], layout="dense")["x"]
                assert torch.equal(found, values)
            finally:
                tq.close()
