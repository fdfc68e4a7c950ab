"""One put and one get of a whole batch; the first of a process also checks what comes back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.data import Batch, nbytes
from bench.peers.base import Peer
from bench.workloads import Row, Share, Workload

_prepared: dict[str, Any] = {}


def put_get(peer: Peer, name: str, batch: Batch) -> dict[str, float]:
    """GB/s (10**9 bytes) of the put, of the get, and of both in a row."""
    if name not in _prepared:
        _prepared.clear()
        _prepared[name] = peer.prepare(batch)
        peer.put(_prepared[name])
        got = peer.get()
        for field, column in batch.items():
            if isinstance(column, np.ndarray) and column.ndim == 2:
                np.testing.assert_array_equal(peer.column(got, field), column)
        del got
        peer.drop()
    start = time.perf_counter()
    peer.put(_prepared[name])
    between = time.perf_counter()
    got = peer.get()
    end = time.perf_counter()
    del got
    peer.drop()
    size = nbytes(batch) / 1e9
    return {"put": size / (between - start), "get": size / (end - between), "both": size / (end - start)}


def over_tcp(name: str, title: str, target: float) -> Workload:
    """The workload ``name`` over TCP on loopback. ``target``: GB/s of a put and a get."""
    return Workload(
        f"{title}, over TCP",
        ("ours_tcp", "ours_tls", "upstream", "redis_server", "flight"),
        _rows(name, "TCP", target),
        ours="ours_tcp",
    )


def through_mooncake(name: str, title: str, times: float | None = None) -> Workload:
    """The workload ``name`` through Mooncake over TCP, beside Mooncake itself, without and with packing.

    ``times``: how many times as fast as the release on PyPI a put and a get have to be.
    """
    return Workload(
        f"{title}, through Mooncake over TCP",
        ("ours_mooncake", "upstream_mooncake", "mooncake_raw", "mooncake_packed"),
        _rows(name, "Mooncake", None),
        ours="ours_mooncake",
        rival="upstream_mooncake",
        shares=(
            *(Share(metric, "mooncake_raw", 0.8) for metric in ("put", "get", "both")),
            *(() if times is None else (Share("both", "upstream_mooncake", times, bound="mooncake_raw"),)),
        ),
    )


def _rows(name: str, way: str, target: float | None) -> tuple[Row, ...]:
    return (
        Row("put", f"{name} put, {way}", "GB/s", "higher"),
        Row("get", f"{name} get, {way}", "GB/s", "higher"),
        Row("both", f"{name} put→get, {way}", "GB/s", "higher", target),
    )
