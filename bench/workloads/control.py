"""The control plane: new rows, a field made ready, rows fetched; one row and 1024 rows a request.

16 requests of one client are under way at a time. A field is made ready by the put of one number a row, so those rows
of the table hold the storage of 8 bytes as well.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from tensordict import TensorDict

from bench.peers.queue import Queue
from bench.workloads import Row, Workload

IN_FLIGHT = 16
WORKLOAD = Workload(
    "Control plane",
    ("ours", "upstream"),
    (
        Row("insert_1", "insert, 1 row a request", "requests/s", "higher", 5000),
        Row("ready_1", "put of one number, 1 row a request", "requests/s", "higher", 5000),
        Row("fetch_1", "fetch, 1 row a request", "requests/s", "higher", 5000),
        Row("insert_1024", "insert, 1024 rows a request", "rows/s", "higher", 3e6),
        Row("ready_1024", "put of one number a row, 1024 rows a request", "rows/s", "higher", 3e6),
        Row("fetch_1024", "fetch, 1024 rows a request", "rows/s", "higher", 3e6),
    ),
    repetitions=3,
)
_numbers = itertools.count()


async def _all(work: Callable[[int], Awaitable[Any]], count: int) -> tuple[list[Any], float]:
    """Results of ``work(0..count)`` and the seconds they took."""
    results: list[Any] = [None] * count
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            results[number] = await work(number)

    start = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return results, time.perf_counter() - start


async def _operations(client: Any, rows: int, count: int) -> dict[str, float]:
    partition = f"control-{next(_numbers)}"
    field = TensorDict({"x": torch.zeros(rows, dtype=torch.int64)}, batch_size=[rows])
    metas, inserting = await _all(
        lambda _: client.async_get_meta(["x"], rows, partition, mode="insert", task_name="t"), count
    )
    _, putting = await _all(lambda number: client.async_put(field, metadata=metas[number]), count)
    fetched, fetching = await _all(
        lambda _: client.async_get_meta(["x"], rows, partition, mode="fetch", task_name="t"), count
    )
    indexes = {index for meta in fetched for index in meta.global_indexes}
    if len(indexes) != rows * count:
        raise RuntimeError(f"{rows * count} rows were put, {len(indexes)} fetched")
    await client.async_clear_partition(partition)
    scale = rows * count
    return {
        f"insert_{rows}": scale / inserting,
        f"ready_{rows}": scale / putting,
        f"fetch_{rows}": scale / fetching,
    }


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    ours = 4 if options["peer"] == "ours" else 1  # enough of them that each takes a while
    count = ours * (100 if options["scale"] == "full" else 16)
    single = asyncio.run(_operations(peer.client, 1, count))
    return single | asyncio.run(_operations(peer.client, 1024, 2 * IN_FLIGHT))
