"""A batch of 9 dense fields, 302 MB, through Mooncake over TCP."""

from __future__ import annotations

from bench.workloads.batches import through_mooncake
from bench.workloads.dense import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = through_mooncake("dense", "Dense batch, 302 MB")
