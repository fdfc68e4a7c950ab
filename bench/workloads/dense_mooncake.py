"""A batch of 9 dense fields, 302 MB, through Mooncake over TCP."""

from __future__ import annotations

from bench.workloads import Row, Workload
from bench.workloads.dense import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = Workload(
    "Dense batch, 302 MB, through Mooncake over TCP",
    ("ours_mooncake", "upstream_mooncake", "mooncake_raw"),
    (
        Row("put", "dense put, Mooncake", "GB/s", "higher"),
        Row("get", "dense get, Mooncake", "GB/s", "higher"),
        Row("both", "dense put→get, Mooncake", "GB/s", "higher"),
    ),
    ours="ours_mooncake",
    rival="upstream_mooncake",
)
