"""Head of line: the slowest of a few unrelated requests while another consumer waits for rows that do not come."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from contextlib import suppress
from typing import Any

from bench.peers.queue import Queue
from bench.workloads import Row, Workload

WORKLOAD = Workload(
    "Head of line",
    ("ours", "upstream"),
    (
        Row("alone", "insert of a row, nobody waits", "ms", "lower"),
        Row("beside", "insert of a row beside a waiting consumer", "ms", "lower"),
        Row("ratio", "waiting : alone", "x", "lower", 1.2),
    ),
    repetitions=3,
)
_numbers = itertools.count()


async def _insert(client: Any, count: int) -> float:
    """Median milliseconds; how long one consumer's wait blocks others shows in the median of a few."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await client.async_get_meta(["x"], 1, "unrelated", mode="insert", task_name="t")
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


async def _measure(client: Any, ours: bool) -> dict[str, float]:
    count = 200 if ours else 20
    alone = await _insert(client, count)
    partition = f"waiting-{next(_numbers)}"
    await client.async_get_meta(["x"], 1, partition, mode="insert", task_name="t")
    waiter = asyncio.create_task(client.async_get_meta(["x"], 1, partition, mode="fetch", task_name="t"))
    await asyncio.sleep(0.2)  # the request has to arrive; nothing tells that it did
    if waiter.done():
        raise RuntimeError(f"the consumer did not wait: {waiter.result()}")
    beside = await _insert(client, count if ours else 1)
    waiter.cancel()
    with suppress(asyncio.CancelledError, RuntimeError, TimeoutError):
        await waiter
    return {"alone": alone, "beside": beside, "ratio": beside / alone}


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    return asyncio.run(_measure(peer.client, options["peer"] == "ours"))
