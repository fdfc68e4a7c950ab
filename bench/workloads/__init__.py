"""One module a workload: ``WORKLOAD`` says who runs it and which rows it fills, ``measure`` runs once inside a peer.

``measure(peer, options)`` returns metric -> value. Options: ``scale`` is ``full`` or ``smoke``; ``long``:
what takes many minutes is measured too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

ORDER = (
    "dense", "mixed", "dense_tcp", "mixed_tcp", "dense_mooncake", "mixed_mooncake",
    "small", "control", "growth", "waiting", "clients", "shards", "ppo", "ppo_mooncake",
)  # fmt: skip
SMOKE = ("dense", "mixed", "small", "control")
"""What the smoke run measures: what takes seconds, and tells most of how fast this version is."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a metric of every peer, and what ours has to reach."""

    metric: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    target: float | None = None

    def reached(self, value: float) -> bool:
        assert self.target is not None
        return value >= self.target if self.better == "higher" else value <= self.target


@dataclass(frozen=True)
class Share:
    """What ours has to reach of another peer's figure in the same run; ``bound``: a peer that ours cannot outdo, as
    it is what ours runs on."""

    metric: str
    peer: str
    least: float
    bound: str | None = None


@dataclass(frozen=True)
class Workload:
    title: str
    peers: tuple[str, ...]
    rows: tuple[Row, ...]
    repetitions: int = 5
    interleaved: bool = True
    """False where the peers together need more memory than a small machine has: one after the other, started anew."""
    ours: str = "ours"
    """The peer that is this checkout."""
    rival: str = "upstream"
    """The peer that ratios are printed against."""
    shares: tuple[Share, ...] = ()

    def compared(self, scale: str) -> tuple[str, ...]:
        """Who runs at this scale: in the smoke run only ours and its rival."""
        return self.peers if scale == "full" else (self.ours, self.rival)


def workload(name: str) -> Workload:
    found = importlib.import_module(f"bench.workloads.{name}").WORKLOAD
    assert isinstance(found, Workload)
    return found
