"""A batch of dense, ragged and text fields, 252 MB, over TCP on loopback."""

from __future__ import annotations

from bench.workloads.batches import over_tcp
from bench.workloads.mixed import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = over_tcp("mixed", "Mixed batch, 252 MB", 0.8)
