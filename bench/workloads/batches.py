"""One put and one get of a whole batch; the first of a process also checks what comes back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.data import ROWS, Batch, nbytes
from bench.peers.base import Peer
from bench.workloads import Against, Row, Workload

SOME_FIELDS, SOME_ROWS = 2, 128
NEW_MEMORY = "A copy into new memory, as a get gives it, runs at {limits/machine/fresh}."
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
    some = {}
    if get_some := getattr(peer, "get_some", None):
        began = time.perf_counter()
        get_some(list(batch)[:SOME_FIELDS], range(ROWS // 4, ROWS // 4 + SOME_ROWS))
        some["some"] = (time.perf_counter() - began) * 1e3
    peer.drop()
    size = nbytes(batch) / 1e9
    return {"put": size / (between - start), "get": size / (end - between), "both": size / (end - start), **some}


def over_tcp(name: str, title: str, target: float) -> Workload:
    """The workload ``name`` over TCP on loopback. ``target``: GB/s of a put and a get."""
    return Workload(
        f"{title}, over TCP",
        ("ours_tcp", "ours_tls", "upstream", "redis_server", "flight", "loopback"),
        _rows(
            name, "TCP", target, f"The same bytes over plain sockets, without a queue: {{{name}_tcp/loopback/both}}."
        ),
        ours="ours_tcp",
        against=(
            Against(
                "both",
                f"{name} put→get: TLS against plain TCP",
                "ours_tls",
                "ours_tcp",
                0.65,
                "TLS may cost 35 %. One connection of the standard library, the least that Python can do, carries "
                "{limits/machine/tls} with TLS and {limits/machine/tcp} without, for {limits/machine/tls_cpu} and "
                "{limits/machine/tcp_cpu} of CPU on both sides together; the cipher alone takes "
                "{limits/machine/cipher} on each side.",
            ),
        ),
    )


def through_mooncake(name: str, title: str, times: float | None = None) -> Workload:
    """The workload ``name`` through Mooncake over TCP, beside Mooncake itself, without and with packing, and beside its
    structured store.

    ``times``: how many times as fast as the release on PyPI a put and a get have to be.
    """
    ours, alone = "ours_mooncake", "mooncake_raw"
    limit = (
        "With the user's arrays copied into its buffer first, Mooncake alone carries "
        f"{{{name}_mooncake/mooncake_packed/both}}; "
        "a copy into warm memory runs at {limits/machine/memcpy}, plain TCP on loopback at {dense_tcp/loopback/put}."
    )
    against = [
        Against(metric, f"{name} {way}: against Mooncake alone", ours, alone, 0.8, limit)
        for metric, way in (("put", "put"), ("get", "get"), ("both", "put→get"))
    ]
    structured = f"Mooncake's own structured store carries {{{name}_mooncake/mooncake_structured/both}}."
    ways = (("put", "put"), ("get", "get"), ("both", "put→get"))
    against += [
        Against(metric, f"{name} {way}: against the structured store", ours, "mooncake_structured", 1.05, structured)
        for metric, way in ways
    ]
    if times is not None:
        runs_on = f"Mooncake alone, which ours runs on, carries {{{name}_mooncake/{alone}/both}}."
        title_of = f"{name} put→get: against MooncakeStore of the release"
        against.append(Against("both", title_of, ours, "upstream_mooncake", times, runs_on))
    return Workload(
        f"{title}, through Mooncake over TCP",
        (ours, "upstream_mooncake", alone, "mooncake_packed", "mooncake_structured"),
        (
            *_rows(name, "Mooncake"),
            Row("some", f"{name}: {SOME_ROWS} rows of {SOME_FIELDS} dense fields, Mooncake", "ms", "lower"),
        ),
        ours=ours,
        rival="upstream_mooncake",
        against=tuple(against),
    )


def _rows(name: str, way: str, target: float | None = None, limit: str = "") -> tuple[Row, ...]:
    return (
        Row("put", f"{name} put, {way}", "GB/s", "higher"),
        Row("get", f"{name} get, {way}", "GB/s", "higher"),
        Row("both", f"{name} put→get, {way}", "GB/s", "higher", target, limit=limit),
    )
