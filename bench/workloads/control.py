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


def _rows(rows: int, unit: str, target: float) -> tuple[Row, ...]:
    speeds, costs = [], []
    for name, what in (("insert", "insert"), ("ready", "put of one number a row"), ("fetch", "fetch")):
        metric, title = f"{name}_{rows}", f"{what}, {rows} row{'s' if rows > 1 else ''} a request"
        limit = (
            f"The client's process alone computes {{control/ours/{metric}_cpu}} for each {unit}, on one core; "
            "controller and storage units share the other cores, and the client's where there are no others."
        )
        speeds.append(Row(metric, title, f"{unit}s/s", "higher", target, limit=limit))
        costs.append(Row(f"{metric}_cpu", f"client's CPU for each {unit}: {title}", "µs", "lower", judged=False))
    return (*speeds, *costs)


WORKLOAD = Workload(
    "Control plane",
    ("ours", "upstream"),
    (*_rows(1, "request", 5000), *_rows(1024, "row", 3e6)),
    repetitions=3,
)
_numbers = itertools.count()


async def _all(work: Callable[[int], Awaitable[Any]], count: int) -> tuple[list[Any], float, float]:
    """Results of ``work(0..count)``, the seconds they took, and those of this process's CPU."""
    results: list[Any] = [None] * count
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            results[number] = await work(number)

    start, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return results, time.perf_counter() - start, time.process_time() - busy


async def _operations(client: Any, rows: int, count: int) -> dict[str, float]:
    partition = f"control-{next(_numbers)}"
    field = TensorDict({"x": torch.zeros(rows, dtype=torch.int64)}, batch_size=[rows])
    metas, inserting, insert_cpu = await _all(
        lambda _: client.async_get_meta(["x"], rows, partition, mode="insert", task_name="t"), count
    )
    _, putting, ready_cpu = await _all(lambda number: client.async_put(field, metadata=metas[number]), count)
    fetched, fetching, fetch_cpu = await _all(
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
        f"insert_{rows}_cpu": insert_cpu / scale * 1e6,
        f"ready_{rows}_cpu": ready_cpu / scale * 1e6,
        f"fetch_{rows}_cpu": fetch_cpu / scale * 1e6,
    }


def measure(peer: Queue, options: dict[str, Any]) -> dict[str, float]:
    ours = 4 if options["peer"] == "ours" else 1  # enough of them that each takes a while
    count = ours * (100 if options["scale"] == "full" else 16)
    single = asyncio.run(_operations(peer.client, 1, count))
    return single | asyncio.run(_operations(peer.client, 1024, 2 * IN_FLIGHT))
