"""A batch of 9 dense fields, 302 MB, over TCP on loopback."""

from __future__ import annotations

from bench.workloads.batches import over_tcp
from bench.workloads.dense import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = over_tcp("dense", "Dense batch, 302 MB", 1.6)
