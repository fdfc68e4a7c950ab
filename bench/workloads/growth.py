"""A fetch of one row, and the status of consumption, in a partition of 1,000 and of 1,000,000 ready rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from bench.peers.queue import Queue
from bench.workloads import Row, Workload

WORKLOAD = Workload(
    "Growth (PyPI release: 100,000 rows, not 1,000,000)",
    ("ours", "upstream"),
    (
        Row("fetch_small", "fetch at 1,000 rows", "ms", "lower"),
        Row("fetch_large", "fetch at 1,000,000 rows", "ms", "lower"),
        Row("growth", "fetch, large : small", "x", "lower", 2.0),
        Row("status_large", "consumption status at 1,000,000 rows", "ms", "lower", 20.0),
    ),
    repetitions=3,
)
CHUNK = 10_000


def _milliseconds(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _fill(client: Any, partition: str, rows: int) -> None:
    if partition in client.get_partition_list():
        return
    size = min(rows, CHUNK)
    field = TensorDict({"x": torch.zeros(size, dtype=torch.int64)}, batch_size=[size])
    for _ in range(rows // size):
        client.put(field, partition_id=partition)


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    client = peer.client
    large = 1_000_000 if options["peer"] == "ours" else 100_000
    if options["scale"] == "smoke":
        large //= 10
    _fill(client, "growth-small", 1000)
    _fill(client, "growth-large", large)

    def fetch(partition: str) -> float:
        return _milliseconds(lambda: client.get_meta(["x"], 1, partition, mode="fetch", task_name="t"), 20)

    small, big = fetch("growth-small"), fetch("growth-large")
    status = _milliseconds(lambda: client.get_consumption_status("t", "growth-large"), 2)
    return {"fetch_small": small, "fetch_large": big, "growth": big / small, "status_large": status}
