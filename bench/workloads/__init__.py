"""One module a workload: ``WORKLOAD`` says who runs it and which rows it fills, ``measure`` runs once inside a peer.

``measure(peer, options)`` returns metric -> value. Options: ``scale`` is ``full`` or ``smoke``; ``long``:
what takes many minutes is measured too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

ORDER = (
    "limits", "dense", "mixed", "complex", "dense_tcp", "mixed_tcp", "dense_mooncake", "mixed_mooncake",
    "complex_mooncake", "small", "start", "control", "growth", "waiting", "stalls", "clients", "shards", "ppo",
    "ppo_mooncake",
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
    judged: bool = True
    """Whether the smoke run judges it: not the slowest of few requests, which varies, nor what only explains others."""
    limit: str = ""
    """What stops this row short of its target, with measurements of the same run: ``{workload/peer/metric}``."""

    def reached(self, value: float) -> bool:
        assert self.target is not None
        return value >= self.target if self.better == "higher" else value <= self.target


@dataclass(frozen=True)
class Against:
    """How many times better one peer has to be than another one."""

    metric: str
    title: str
    peer: str
    other: str
    target: float
    limit: str = ""
    """As of a row."""


@dataclass(frozen=True)
class Workload:
    title: str
    peers: tuple[str, ...]
    rows: tuple[Row, ...]
    repetitions: int = 5
    interleaved: bool = True
    """False where the peers together need more memory than a small machine has: one after the other, started again."""
    ours: str = "ours"
    """The peer that is this checkout."""
    rival: str = "upstream"
    """The peer that ratios are printed against."""
    against: tuple[Against, ...] = ()

    def compared(self, scale: str) -> tuple[str, ...]:
        """Who runs at this scale: in the smoke run only ours and its rival."""
        return self.peers if scale == "full" else (self.ours, self.rival)


def about(name: str) -> str:
    """What the workload does: the first paragraph of its module's text."""
    text = importlib.import_module(f"bench.workloads.{name}").__doc__ or ""
    return " ".join(text.partition("\n\n")[0].split())


def workload(name: str) -> Workload:
    found = importlib.import_module(f"bench.workloads.{name}").WORKLOAD
    assert isinstance(found, Workload)
    return found
