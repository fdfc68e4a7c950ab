"""The first program where /dev/shm has the 64 MB of containers that were started without --shm-size."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.integration.stack import ROOT

PROGRAM = """
import torch, transfer_queue as tq
from tensordict import TensorDict
tq.init()
rows = torch.arange(30_000_000.0).view(2, -1)  # 120 MB
tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": rows}, [2]))
assert torch.equal(tq.kv_batch_get(["a", "b"], "p")["x"].to_padded_tensor(0), rows)
tq.close()
"""


def test_the_first_program_runs_and_is_told_where_its_rows_are() -> None:
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", sys.executable, "-c", PROGRAM],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "/dev/shm has 64 MiB free, and the storage units take 2048 MiB" in done.stderr
    for setting in ("--shm-size=2112m", "emptyDir", "unit_capacity"):
        assert setting in done.stderr
