"""``tq bench``: what a queue of each backend moves on this machine, so that a choice rests on figures of one's own."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.cli.machine import machine
from transfer_queue.cli.output import make_table
from transfer_queue.errors import ConfigError, StartError, TransferQueueError
from transfer_queue.storage.conformance.servers import Servers
from transfer_queue.storage.registry import backend_names, backend_servers

__all__ = ["Figure", "Report", "chosen_backends", "draw_report", "machine", "measure", "measure_all"]

_ROWS = 256
_PACKAGES = {"mooncake": "mooncake", "ray": "ray", "yuanrong": "yr"}
"""Modules that built-in backends need."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One backend with one kind of batch of ``mb`` MB: the best of the rounds, GB/s."""

    backend: str
    batch: str
    mb: int
    put: float
    get: float


@dataclass(frozen=True)
class Report:
    """``missing``: backends that were not measured, with the reason."""

    machine: dict[str, Any]
    figures: list[Figure]
    missing: dict[str, str]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def chosen_backends(name: str) -> list[str]:
    """``all`` or one backend. Raises ConfigError for one that is not known."""
    known = backend_names()
    if name == "all":
        return sorted(known, key=lambda each: (each != "simple", each))
    if name not in known:
        raise ConfigError(f'--backend: "{name}" is not known; use all, {", ".join(known)}')
    return [name]


def measure_all(names: Sequence[str], mb: int, rounds: int, say: Say) -> Report:
    """Measure backends one after the other. One that cannot be started here is noted with the reason; if it is the
    only one, raises StartError."""
    report = Report(machine(), [], {})
    for name in names:
        say(f"measuring {name}")
        try:
            report.figures.extend(measure(name, mb, rounds))
        except TransferQueueError as error:
            report.missing[name] = " ".join(str(error).split())
    if not report.figures:
        raise StartError("; ".join(f"{name}: {reason}" for name, reason in report.missing.items()))
    return report


def measure(kind: str, mb: int, rounds: int) -> list[Figure]:
    """Start a queue of two storage units of backend ``kind`` and move batches of ``mb`` MB.

    Raises TransferQueueError.
    """
    package = _PACKAGES.get(kind)
    if package and importlib.util.find_spec(package) is None:
        raise StartError(f"it is not installed: pip install 'TransferQueue[{kind}]'")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transferqueue-bench-")))
        settings = stack.enter_context(backend_servers(kind, folder))
        # Two batches a unit: what was cleared may be given back a little later.
        servers = Servers(kind, settings, folder, max(64, 2 * mb) << 20)
        stack.callback(servers.stop)
        tq.init({"controller": {"addresses": [servers.address]}, "security": {"allowPickle": False}})
        stack.callback(tq.close)
        return [_measure_batch(kind, name, batch, rounds) for name, batch in _batches(mb).items()]


def _measure_batch(kind: str, name: str, batch: TensorDict, rounds: int) -> Figure:
    keys = [f"k{row}" for row in range(_ROWS)]
    nbytes = _nbytes(batch)
    puts, gets = [], []
    for number in range(rounds + 1):  # the first makes connections and buffers
        partition = f"{name}-{number}"
        began = time.perf_counter()
        tq.kv_batch_put(keys, partition, batch)
        stored = time.perf_counter()
        found = tq.kv_batch_get(keys, partition)
        puts.append(stored - began)
        gets.append(time.perf_counter() - stored)
        if not torch.equal(torch.stack(list(found["dense"].unbind())), batch["dense"]):
            raise TransferQueueError(f"backend {kind} gave other bytes than were put")
        del found
        tq.kv_clear(keys, partition)
    return Figure(
        kind, name, nbytes // 1_000_000, round(nbytes / min(puts[1:]) / 1e9, 3), round(nbytes / min(gets[1:]) / 1e9, 3)
    )


def _batches(mb: int) -> dict[str, TensorDict]:
    """``dense``: one field. ``mixed``: a third each of dense and ragged rows, and text and objects."""
    words = mb * 1_000_000 // 4 // _ROWS
    third = max(8, words // 3)
    lengths = [third // 2 + third * row // _ROWS for row in range(_ROWS)]
    ragged = torch.nested.as_nested_tensor([torch.rand(length) for length in lengths], layout=torch.jagged)
    return {
        "dense": TensorDict({"dense": torch.rand(_ROWS, words)}, batch_size=[_ROWS]),
        "mixed": TensorDict(
            {
                "dense": torch.rand(_ROWS, third),
                "ragged": ragged,
                "text": [f"row {row} " + "x" * third for row in range(_ROWS)],
                "object": [{"row": row, "score": [row, 0.5]} for row in range(_ROWS)],
            },
            batch_size=[_ROWS],
        ),
    }


def _nbytes(batch: TensorDict) -> int:
    """Bytes of tensors, and of text as UTF-8; objects are too small to count."""
    total = 0
    for name in batch.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        column = batch.get(name)
        if isinstance(column, torch.Tensor):
            values = column.values() if column.is_nested else column
            total += values.numel() * values.element_size()
        else:
            total += sum(len(value) for value in column.tolist() if isinstance(value, str))
    return total


def draw_report(report: Report) -> list[Any]:
    facts = report.machine
    rows = [[each.backend, each.batch, each.mb, each.put, each.get] for each in report.figures]
    parts: list[Any] = [
        make_table(["backend", "batch", "MB", "put GB/s", "get GB/s"], rows),
        f"{facts['cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, torch {facts['torch']}; load average {facts['load']} at the start",
    ]
    return parts + [f"{name} was not measured: {reason}" for name, reason in report.missing.items()]
