"""A batch of 9 dense fields, 302 MB, on one host."""

from __future__ import annotations

from typing import Any

from bench import data
from bench.peers.base import Peer
from bench.workloads import Row, Workload
from bench.workloads.batches import NEW_MEMORY, put_get

WORKLOAD = Workload(
    "Dense batch, 302 MB",
    ("ours", "upstream", "ray_store", "redis_server", "flight", "memcpy"),
    (
        Row(
            "put", "dense put", "GB/s", "higher", 4.0, limit="A copy into warm memory runs at {limits/machine/memcpy}."
        ),
        Row("get", "dense get, independent copy", "GB/s", "higher", 3.0, limit=NEW_MEMORY),
        Row("both", "dense put→get", "GB/s", "higher"),
    ),
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    return put_get(peer, "dense", data.dense(9 if options["scale"] == "full" else 3))
