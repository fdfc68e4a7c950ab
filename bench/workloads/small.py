"""One row of 1 KB at a time, and 64 puts of such rows under way at once in one process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.peers.base import Peer
from bench.workloads import Row, Workload

_LANES = 64
_LIMIT = (
    "The caller waits for a storage unit and for the controller, two processes. A call that hands one message to the "
    "thread with the event loop, which sends it to one other process and gets it back, takes {limits/machine/call_p50} "
    "here by itself (p99 {limits/machine/call_p99}), and the message alone {limits/machine/round_trip_p50}."
)
_ASYNC_LIMIT = "The client's process alone computes {small/ours/async_puts_cpu} for each row, on one core."
WORKLOAD = Workload(
    "1 KB put and get",
    ("ours", "upstream", "ray_store", "redis_server", "mooncake_structured"),
    (
        Row("put_p50", "1 KB put, p50", "ms", "lower", 0.3, limit=_LIMIT),
        Row("put_p99", "1 KB put, p99", "ms", "lower", 1.0, judged=False, limit=_LIMIT),
        Row("get_p50", "1 KB get, p50", "ms", "lower", 0.3, limit=_LIMIT),
        Row("get_p99", "1 KB get, p99", "ms", "lower", 1.0, judged=False, limit=_LIMIT),
        Row(
            "async_puts",
            "1 KB rows, 64 awaited puts of one process",
            "rows/s",
            "higher",
            8000,
            judged=False,
            limit=_ASYNC_LIMIT,
        ),
        Row("async_puts_cpu", "client's CPU for each of them", "µs", "lower", judged=False),
    ),
)


def _milliseconds(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for number in range(count):
        start = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def _together(put: Callable[[int], Awaitable[None]], count: int) -> dict[str, float]:
    """Puts of single rows, 64 at a time."""

    async def run() -> float:
        numbers = iter(range(count))

        async def lane() -> None:
            for number in numbers:
                await put(number)

        start = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(_LANES)))
        return time.perf_counter() - start

    busy = time.process_time()
    return {"async_puts": count / asyncio.run(run()), "async_puts_cpu": (time.process_time() - busy) / count * 1e6}


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    count = 300 if options["scale"] == "full" else 60
    row = peer.prepare_small()
    puts = _milliseconds(lambda number: peer.put_small(number, row), count)
    gets = _milliseconds(peer.get_small, count)
    result = {}
    for name, times in (("put", puts), ("get", gets)):
        result[f"{name}_p50"] = statistics.median(times)
        result[f"{name}_p99"] = times[int(len(times) * 0.99)]
    if put_small_async := getattr(peer, "put_small_async", None):  # queues have it
        result |= _together(put_small_async, 8 * count)
    return result
