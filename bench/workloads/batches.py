"""One put and one get of a whole batch; the first of a process also checks what comes back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.data import Batch, nbytes
from bench.peers.base import Peer

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
