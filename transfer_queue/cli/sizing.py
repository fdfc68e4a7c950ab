"""Estimate of the storage of a job and of the time to move its samples: a pure function of named assumptions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transfer_queue.cli.output import human_bytes, make_table
from transfer_queue.errors import ConfigError

__all__ = ["Job", "Sizing", "draw_sizing", "parse_tokens", "size"]

_MARGIN = 1.3
"""Room for samples that are not spread evenly, and for blocks that are freed a moment later."""
_LINK_USE = 0.7
"""Share of a node's network that samples get; the rest is weights and protocol."""
_SMALLEST_UNIT = 2**30
_CLIENT_BUFFER = 2**30


@dataclass(frozen=True)
class Job:
    """``tokens``: of one sample. ``bytes_per_token``: of all its fields; 28 are token ids (8), attention mask (8) and
    three float32 columns such as log-probabilities, reference log-probabilities and advantages. ``gbits``: of a node's
    network, Gb/s."""

    gpus: int
    tokens: int
    samples: int
    bytes_per_token: float = 28.0
    steps_in_flight: int = 2
    gpus_per_node: int = 8
    gbits: float = 200.0


@dataclass(frozen=True)
class Sizing:
    """Bytes and seconds. A step's samples cross the network twice, once written and once read."""

    nodes: int
    sample_bytes: int
    step_bytes: int
    stored_bytes: int
    units: int
    unit_bytes: int
    client_buffer_bytes: int
    transfer_s: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


def size(job: Job) -> Sizing:
    """Raises ConfigError for a job without data."""
    if job.bytes_per_token <= 0 or job.tokens <= 0:
        raise ConfigError("--bytes-per-token and --seq must be positive")
    nodes = math.ceil(job.gpus / job.gpus_per_node)
    sample = math.ceil(job.tokens * job.bytes_per_token)
    step = sample * job.samples
    stored = math.ceil(step * job.steps_in_flight * _MARGIN)
    # One unit a node spreads the load; more nodes than a unit of the smallest size each would only be idle.
    units = max(1, min(nodes, math.ceil(stored / _SMALLEST_UNIT)))
    unit = math.ceil(stored / units / _SMALLEST_UNIT) * _SMALLEST_UNIT
    bytes_per_s = units * job.gbits * 1e9 / 8 * _LINK_USE
    return Sizing(nodes, sample, step, stored, units, unit, _CLIENT_BUFFER, 2 * step / bytes_per_s)


def parse_tokens(text: str) -> int:
    """``4096``, ``32k`` (1024 each) or ``1m``. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if match is None or not int(match[1]):
        raise ConfigError(f"--seq: {text!r} is not a number of tokens; write for example 4096 or 32k")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def draw_sizing(job: Job, sizing: Sizing) -> Sequence[Any]:
    """The sizing as a table, and the part of a resource that it asks for."""
    gib = sizing.unit_bytes // 2**30
    rows: list[list[object]] = [
        ["nodes", sizing.nodes, f"{job.gpus} GPUs, {job.gpus_per_node} a node"],
        ["a sample", human_bytes(sizing.sample_bytes), f"{job.tokens} tokens of {job.bytes_per_token:g} bytes"],
        ["a step", human_bytes(sizing.step_bytes), f"{job.samples} samples"],
        ["storage", human_bytes(sizing.stored_bytes), f"{job.steps_in_flight} steps at once, {_MARGIN:g} for margin"],
        ["storage units", sizing.units, f"{gib} GiB each"],
        ["buffer of a client", human_bytes(sizing.client_buffer_bytes), "Mooncake's transfer buffer"],
        ["moving a step", f"{sizing.transfer_s:.2g} s", f"in and out, {_LINK_USE:.0%} of {job.gbits:g} Gb/s a unit"],
    ]
    spec = f"spec:\n  storage:\n    replicas: {sizing.units}\n    capacity: {gib}Gi  # mooncake: globalSegmentSize"
    return [make_table(["WHAT", "HOW MUCH", "WHY"], [[str(cell) for cell in row] for row in rows]), "", spec]
