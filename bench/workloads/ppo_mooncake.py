"""The transfers of one PPO step through Mooncake over TCP. 512 rows: the release on PyPI fails at 1024."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Peer
from bench.workloads import Against, Row, Workload
from bench.workloads.ppo import STAGES, WORKERS, queue_step

ROWS = {"full": 512, "smoke": 64}
_RELEASE = "against MooncakeStore of the release"
_TCP = "All bytes cross the loopback, which carries {dense_tcp/loopback/put} over one plain connection."
WORKLOAD = Workload(
    "One PPO step through Mooncake over TCP, 8 workers, 512 rows",
    ("ours_mooncake", "upstream_mooncake"),
    (
        *(Row(stage.name, f"PPO step, Mooncake: {stage.name}", "s", "lower") for stage in STAGES),
        Row("total", "PPO step, Mooncake: total", "s", "lower"),
    ),
    repetitions=3,
    interleaved=False,
    ours="ours_mooncake",
    rival="upstream_mooncake",
    against=(
        Against("update_actor", f"update_actor, Mooncake: {_RELEASE}", "ours_mooncake", "upstream_mooncake", 4.0, _TCP),
        Against("total", f"whole step, Mooncake: {_RELEASE}", "ours_mooncake", "upstream_mooncake", 3.0, _TCP),
    ),
)


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    return queue_step(peer, ROWS[options["scale"]], WORKERS[options["scale"]])
