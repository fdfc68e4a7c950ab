"""A batch of dense, ragged and text fields, 252 MB, on one host."""

from __future__ import annotations

from typing import Any

from bench import data
from bench.peers.base import Peer
from bench.workloads import Row, Workload
from bench.workloads.batches import NEW_MEMORY, put_get

WORKLOAD = Workload(
    "Mixed batch, 252 MB",
    ("ours", "upstream", "ray_store", "redis_server", "flight", "memcpy"),
    (
        Row("put", "mixed put", "GB/s", "higher"),
        Row("get", "mixed get", "GB/s", "higher"),
        Row("both", "mixed put→get", "GB/s", "higher", 1.5, limit=NEW_MEMORY),
    ),
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    return put_get(peer, "mixed", data.mixed(4 if options["scale"] == "full" else 1))
