"""A batch of dense, ragged and text fields, 252 MB, through Mooncake over TCP."""

from __future__ import annotations

from bench.workloads.batches import through_mooncake
from bench.workloads.mixed import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = through_mooncake("mixed", "Mixed batch, 252 MB", times=4.0)
