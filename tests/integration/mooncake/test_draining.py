"""A storage unit whose rows are moved to the others before it ends."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import running_stack
from tests.integration.test_draining import run_drain, units
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
