"""A batch of dense and ragged fields and of long texts, 252 MB, through Mooncake over TCP."""

from __future__ import annotations

from bench.workloads.batches import through_mooncake
from bench.workloads.complex import measure

__all__ = ["WORKLOAD", "measure"]

WORKLOAD = through_mooncake("complex", "Complex batch, 252 MB")
