"""A new process attaches to a queue that runs and puts one row, a dict of one tensor: from its start to that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from bench.peers.queue import Queue
from bench.workloads import Row, Workload

_LIMIT = "`import torch` alone takes {start/ours/torch_cpu} of it."
WORKLOAD = Workload(
    "First row of a new process",
    ("ours", "upstream"),
    (
        Row("first_put", "start of a process to its first row put", "s", "lower", limit=_LIMIT),
        Row("first_put_cpu", "CPU of it", "s", "lower"),
        Row("torch_cpu", "CPU of `import torch` in it", "s", "lower"),
    ),
    repetitions=3,
)
_PROGRAM = """
import json, os, sys, time
import torch
imported = time.process_time()
attach = json.loads(sys.argv[1])
if "ray" in attach:
    import ray
    ray.init(address=attach.pop("ray"), log_to_driver=False)
import transfer_queue as tq
tq.init(*([attach] if attach else []))
tq.kv_put(key=sys.argv[2], partition_id="start", fields={"x": torch.zeros(4)})
print(json.dumps([time.time(), time.process_time(), imported]), flush=True)
tq.close()
"""


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    began = time.time()
    command = [sys.executable, "-c", _PROGRAM, json.dumps(peer.attached), f"k{began}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = done.stdout.splitlines()
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    put, cpu, imported = json.loads(lines[-1])
    return {"first_put": put - began, "first_put_cpu": cpu, "torch_cpu": imported}
