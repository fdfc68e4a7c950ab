"""A batch of dense, ragged and text fields, 252 MB, over TCP on loopback."""

from __future__ import annotations

from bench.workloads import Row, Workload
from bench.workloads.mixed import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = Workload(
    "Mixed batch, 252 MB, over TCP",
    ("ours_tcp", "upstream", "redis_server", "flight"),
    (
        Row("put", "mixed put, TCP", "GB/s", "higher"),
        Row("get", "mixed get, TCP", "GB/s", "higher"),
        Row("both", "mixed put→get, TCP", "GB/s", "higher", 0.8),
    ),
    ours="ours_tcp",
)
