"""1024 clients of one queue at the same time, each with connections of its own; at full length also 4096 and 8192.

Each puts a row of 1 KB and gets it back, again and again, over TCP. With more than one core the clients are spread over
processes of their own, so that the servers and not one client's loop are what is measured.
"""

from __future__ import annotations

import os
from typing import Any

from bench.clients import measure as measure_clients
from bench.peers.base import Peer
from bench.workloads import Row, Workload

_LIMIT = (
    "Clients, controller and storage units share {machine/cores} cores: an operation took {clients/ours/cpu_1024} of "
    "CPU, of clients and servers together."
)
WORKLOAD = Workload(
    "Many clients",
    ("ours",),
    (
        Row("operations_1024", "puts and gets of 1024 clients", "1/s", "higher", 5000, limit=_LIMIT),
        Row("cpu_1024", "CPU of clients and servers for each of them", "µs", "lower"),
        Row("threads_1024", "threads of the library in a client process", "threads", "lower", 2),
        Row("controller_1024", "memory of the controller a client", "bytes", "lower"),
        Row("client_1024", "memory of a client", "bytes", "lower"),
        Row("operations_4096", "puts and gets of 4096 clients (make bench-full)", "1/s", "higher"),
        Row("operations_8192", "puts and gets of 8192 clients (make bench-full)", "1/s", "higher"),
    ),
    repetitions=2,
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    """Starts servers of its own, whatever ``peer`` runs."""
    found = {}
    for clients in (1024, 4096, 8192) if options.get("long") else (1024,):
        result = measure_clients(clients, processes=max(1, (os.cpu_count() or 1) // 4), turns=5)
        found[f"operations_{clients}"] = float(result["operations_per_s"])
        if clients == 1024:
            found["cpu_1024"] = float(result["cpu_us_per_operation"])
            found["threads_1024"] = float(result["threads"])
            found["controller_1024"] = float(result["server_bytes_per_client"]["controller"])
            found["client_1024"] = float(result["client_bytes_per_client"])
    return found
