"""A batch of dense and ragged fields and of long texts, 252 MB of which 100 MB are strings of 32 KB, on one host."""

from __future__ import annotations

from typing import Any

from bench import data
from bench.peers.base import Peer
from bench.workloads import Against, Row, Workload
from bench.workloads.batches import NEW_MEMORY, put_get

_LIMIT = f"Each string is an object of Python in memory that is new to the reader. {NEW_MEMORY}"
WORKLOAD = Workload(
    "Complex batch, 252 MB",
    ("ours", "upstream", "ray_store", "redis_server", "flight", "memcpy"),
    (
        Row("put", "complex put", "GB/s", "higher"),
        Row("get", "complex get", "GB/s", "higher"),
        Row("both", "complex put→get", "GB/s", "higher", 1.5, limit=_LIMIT),
    ),
    against=(Against("both", "complex put→get: against the release", "ours", "upstream", 5.0, _LIMIT),),
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    return put_get(peer, "complex", data.complex_(3 if options["scale"] == "full" else 1))
