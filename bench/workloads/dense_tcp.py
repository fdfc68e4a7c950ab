"""A batch of 9 dense fields, 302 MB, over TCP on loopback."""

from __future__ import annotations

from bench.workloads import Row, Workload
from bench.workloads.dense import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = Workload(
    "Dense batch, 302 MB, over TCP",
    ("ours_tcp", "upstream", "redis_server", "flight"),
    (
        Row("put", "dense put, TCP", "GB/s", "higher"),
        Row("get", "dense get, TCP", "GB/s", "higher"),
        Row("both", "dense put→get, TCP", "GB/s", "higher", 1.6),
    ),
    ours="ours_tcp",
)
