"""One controller and four that share the partitions, with 512 clients and the same storage units.

The clients work as in `bench.workloads.clients`, spread over 64 partitions. Four controllers are faster only where
there are cores for them: compare with the machine's.
"""

from __future__ import annotations

import os
from typing import Any

from bench.clients import measure as measure_clients
from bench.peers.base import Peer
from bench.workloads import Row, Workload

WORKLOAD = Workload(
    "Several controllers",
    ("ours",),
    (
        Row("operations_1", "puts and gets of 512 clients, one controller", "1/s", "higher"),
        Row("operations_4", "puts and gets of 512 clients, four controllers", "1/s", "higher"),
        Row("growth", "four controllers against one", "x", "higher"),
    ),
    repetitions=2,
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    """Starts servers of its own, whatever ``peer`` runs."""
    processes = max(1, (os.cpu_count() or 1) // 4)
    found = {
        f"operations_{shards}": float(
            measure_clients(512, processes, turns=10, shards=shards, units=4)["operations_per_s"]
        )
        for shards in (1, 4)
    }
    return {**found, "growth": found["operations_4"] / found["operations_1"]}
