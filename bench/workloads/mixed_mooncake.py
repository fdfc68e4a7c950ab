"""A batch of dense, ragged and text fields, 252 MB, through Mooncake over TCP."""

from __future__ import annotations

from bench.workloads import Row, Workload
from bench.workloads.mixed import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = Workload(
    "Mixed batch, 252 MB, through Mooncake over TCP",
    ("ours_mooncake", "upstream_mooncake", "mooncake_raw"),
    (
        Row("put", "mixed put, Mooncake", "GB/s", "higher"),
        Row("get", "mixed get, Mooncake", "GB/s", "higher"),
        Row("both", "mixed put→get, Mooncake", "GB/s", "higher"),
    ),
    ours="ours_mooncake",
    rival="upstream_mooncake",
)
