"""One row of 1 KB at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.peers.base import Peer
from bench.workloads import Row, Workload

_LIMIT = (
    "The caller waits for a storage unit and for the controller, two processes. A call that hands one message to the "
    "thread with the event loop, which sends it to one other process and gets it back, takes {limits/machine/call_p50} "
    "here by itself (p99 {limits/machine/call_p99}), and the message alone {limits/machine/round_trip_p50}."
)
WORKLOAD = Workload(
    "1 KB put and get",
    ("ours", "upstream", "ray_store", "redis_server"),
    (
        Row("put_p50", "1 KB put, p50", "ms", "lower", 0.3, limit=_LIMIT),
        Row("put_p99", "1 KB put, p99", "ms", "lower", 1.0, judged=False, limit=_LIMIT),
        Row("get_p50", "1 KB get, p50", "ms", "lower", 0.3, limit=_LIMIT),
        Row("get_p99", "1 KB get, p99", "ms", "lower", 1.0, judged=False, limit=_LIMIT),
    ),
)


def _milliseconds(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for number in range(count):
        start = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    count = 300 if options["scale"] == "full" else 60
    row = peer.prepare_small()
    puts = _milliseconds(lambda number: peer.put_small(number, row), count)
    gets = _milliseconds(peer.get_small, count)
    result = {}
    for name, times in (("put", puts), ("get", gets)):
        result[f"{name}_p50"] = statistics.median(times)
        result[f"{name}_p99"] = times[int(len(times) * 0.99)]
    return result
