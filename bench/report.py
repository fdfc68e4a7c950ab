"""Results as text: the table, ratios, and ``docs/benchmarks.md`` with its plot. Only ever written from the JSON."""

from __future__ import annotations

import re
import statistics
from html import escape
from math import log10
from typing import Any

from bench.protocol import ROOT
from bench.workloads import Against, Row, about, workload

LABELS = {
    "ours": "TransferQueue",
    "ours_tcp": "TransferQueue, TCP",
    "ours_tls": "TransferQueue, TLS",
    "ours_mooncake": "TransferQueue, Mooncake",
    "upstream": "TransferQueue 0.1 (PyPI)",
    "upstream_mooncake": "TransferQueue 0.1 (PyPI), MooncakeStore",
    "mooncake_raw": "Mooncake alone",
    "mooncake_packed": "Mooncake alone, packing included",
    "mooncake_structured": "Mooncake's structured store",
    "ray_store": "Ray, numpy columns",
    "ray_driver": "Ray driver, no queue: TensorDict",
    "dataproto_driver": "Ray driver, no queue: DataProto",
    "redis_server": "redis",
    "flight": "Arrow Flight",
    "memcpy": "memcpy, one thread",
    "loopback": "loopback TCP alone",
    "machine": "this machine",
}
STEP = (
    ("ppo", "dataproto_driver"), ("ppo", "ray_driver"), ("ppo", "upstream"), ("ppo_mooncake", "upstream_mooncake"),
    ("ppo", "ours"), ("ppo_mooncake", "ours_mooncake"), ("ppo", "memcpy"),
)  # fmt: skip
"""The columns of the table of one PPO step."""


def number(value: float) -> str:
    """Three significant digits; thousands as k, millions as M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def median(results: dict[str, Any], name: str, peer: str, metric: str) -> float | None:
    values = results["workloads"].get(name, {}).get("samples", {}).get(peer, {}).get(metric)
    return statistics.median(values) if values else None


def quoted(results: dict[str, Any], limit: str) -> str:
    """``limit`` with its measurements: ``{workload/peer/metric}``, and ``{machine/cores}``."""

    def value(found: re.Match[str]) -> str:
        name, *rest = found[1].split("/")
        if name == "machine":
            return str(results["machine"][rest[0]])
        peer, metric = rest
        unit = next(row.unit for row in workload(name).rows if row.metric == metric)
        measured = median(results, name, peer, metric)
        return "(not measured)" if measured is None else f"{number(measured)} {unit}"

    return re.sub(r"\{([\w/]+)\}", value, limit)


def cell(results: dict[str, Any], name: str, peer: str, metric: str) -> str:
    values = results["workloads"][name]["samples"].get(peer, {}).get(metric)
    if not values:
        return "failed" if peer in results["workloads"][name]["failed"] else "–"
    return f"{number(statistics.median(values))} ({number(min(values))}–{number(max(values))})"


def verdict(results: dict[str, Any], name: str, row: Row) -> str:
    if row.target is None:
        return ""
    value = median(results, name, workload(name).ours, row.metric)
    sign = "≥" if row.better == "higher" else "≤"
    reached = value is not None and row.reached(value)
    return f"{sign} {number(row.target)} {'reached' if reached else '**missed**'}"


def advantage(results: dict[str, Any], name: str, row: Row, rival: str) -> float | None:
    """How many times better ours is than ``rival``."""
    ours, theirs = (median(results, name, peer, row.metric) for peer in (workload(name).ours, rival))
    if not ours or not theirs:
        return None
    return ours / theirs if row.better == "higher" else theirs / ours


def compared(results: dict[str, Any], name: str, against: Against) -> float | None:
    """How many times better its peer is than the other one."""
    (row,) = (row for row in workload(name).rows if row.metric == against.metric)
    one, other = (median(results, name, peer, row.metric) for peer in (against.peer, against.other))
    if not one or not other:
        return None
    return one / other if row.better == "higher" else other / one


def _when(of: dict[str, Any]) -> str:
    at = of.get("at")
    measured = f" Measured {at['started']}, commit {at['commit']}." if at else ""
    return f"Load average before: {of['load']}.{measured}"


def table(results: dict[str, Any]) -> str:
    """Markdown: one table a workload."""
    lines: list[str] = []
    for name, of in results["workloads"].items():
        plan = workload(name)
        rival = any(advantage(results, name, row, plan.rival) for row in plan.rows)
        lines += [f"### {plan.title}", "", about(name), "", _when(of), ""]
        lines += ["| | unit | target | " + " | ".join(LABELS[peer] for peer in plan.peers) + " |" + " × 0.1 |" * rival]
        lines += ["|---" * (len(plan.peers) + 3 + rival) + "|"]
        for row in plan.rows:
            cells = " | ".join(cell(results, name, peer, row.metric) for peer in plan.peers)
            better = advantage(results, name, row, plan.rival)
            times = (f" {number(better)}x |" if better else " |") if rival else ""
            lines += [f"| {row.title} | {row.unit} | {verdict(results, name, row)} | {cells} |{times}"]
        lines += ["", *(f"{LABELS[peer]} failed: `{error[:300]}`" for peer, error in of["failed"].items()), ""]
    return "\n".join(lines)


def comparisons(results: dict[str, Any]) -> str:
    """Markdown: what was asked for in comparison with a peer."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]
    for name in results["workloads"]:
        for against in workload(name).against:
            value = compared(results, name, against)
            shown = "no result" if value is None else f"{number(value)}x"
            verdict = "reached" if value is not None and value >= against.target else "**missed**"
            lines.append(f"| {against.title} | ≥ {number(against.target)}x | {shown} | {verdict} |")
    return "\n".join(lines)


def step(results: dict[str, Any]) -> str:
    """Markdown: one PPO step through everything that was measured, in seconds."""
    columns = [(name, peer) for name, peer in STEP if name in results["workloads"]]
    if not columns:
        return "Not measured."
    rows = {"ppo": "1024 rows", "ppo_mooncake": "512 rows"}
    lines = ["| s | " + " | ".join(f"{LABELS[peer]}, {rows[name]}" for name, peer in columns) + " |"]
    lines += ["|---" * (len(columns) + 1) + "|"]
    for row in workload("ppo").rows:
        values = [(median(results, name, peer, row.metric), name, peer) for name, peer in columns]
        cells = [
            number(value) if value is not None else cell(results, name, peer, row.metric)
            for value, name, peer in values
        ]
        lines.append(f"| {row.title.removeprefix('PPO step: ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def missed(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Each target that is missed with what was measured, and what the machine gives."""
    found = []
    for name in results["workloads"]:
        for row in workload(name).rows:
            if "missed" in verdict(results, name, row):
                value = median(results, name, workload(name).ours, row.metric)
                shown = "no result" if value is None else f"{number(value)} {row.unit}"
                target = f"{number(row.target or 0)} {row.unit}"
                found.append((f"{row.title}: {shown}, target {target}", quoted(results, row.limit)))
        for against in workload(name).against:
            ratio = compared(results, name, against)
            if ratio is None or ratio < against.target:
                shown = "no result" if ratio is None else f"{number(ratio)}x"
                found.append(
                    (f"{against.title}: {shown}, target {number(against.target)}x", quoted(results, against.limit))
                )
    return found


def short(results: dict[str, Any]) -> str:
    """Markdown: what `missed` finds, together where the limit is one."""
    by_limit: dict[str, list[str]] = {}
    for line, limit in missed(results):
        by_limit.setdefault(limit or "No limit of the machine is known to stop it.", []).append(line)
    return "\n".join(
        "\n".join([*(f"- {line}" for line in lines), "", f"  {limit}", ""]) for limit, lines in by_limit.items()
    )


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """``workload.metric`` -> how many times better ours is than its rival, where the smoke run judges it."""
    found = {}
    for name in results["workloads"]:
        plan = workload(name)
        for row in plan.rows:
            better = advantage(results, name, row, plan.rival)
            if better is not None and row.judged:
                found[f"{name}.{row.metric}"] = float(f"{better:.3g}")
    return found


def plot(results: dict[str, Any]) -> str:
    """An SVG of bars: how many times better than the PyPI release, on a logarithmic axis."""
    bars = [
        (row.title, better)
        for name in results["workloads"]
        for row in workload(name).rows
        if row.target is not None and (better := advantage(results, name, row, workload(name).rival))
    ]
    height, left, decade = 24, 330, 120
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height * (len(bars) + 2)}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for power in range(5):
        x = left + power * decade
        parts.append(f'<line x1="{x}" x2="{x}" y1="20" y2="{height * (len(bars) + 1)}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="14" text-anchor="middle" fill="#555">{10**power}x</text>')
    for position, (title, better) in enumerate(bars):
        y = height * (position + 1)
        width = max(1.0, min(log10(max(better, 1.0)), 4.2) * decade)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(title)}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{width:.0f}" height="16" fill="#2a78b5"/>')
        parts.append(f'<text x="{left + width + 6:.0f}" y="{y + 15}">{number(better)}x</text>')
    return "\n".join([*parts, "</svg>", ""])


def render(results: dict[str, Any]) -> None:
    """Write ``docs/benchmarks.md`` and ``docs/benchmarks.svg``."""
    machine, peers = results["machine"], results["peers"]
    text = f"""# Benchmarks

How fast this version is, beside the release on PyPI and other ways to move the same data, all measured in one run on
one machine. `make bench` measures it on yours, and writes this page; do not edit it.

- **Machine**: {machine["cores"]} cores of {machine["cpu"]}, {machine["memory_gib"]} GiB, Linux {machine["kernel"]},
  Python {machine["python"]}, torch {machine["torch"]}; commit {machine["commit"]}, {machine["started"]}; load average
  **{machine["load"]}** at the start. What else runs on the machine slows all peers, but not all alike.
- **Peers**: {", ".join(f"{name} {version}" for name, version in peers.items())}. *TransferQueue* is this version,
  backend `simple`, on one host through shared memory; *TCP* and *TLS* are it as clients on other hosts see it;
  *Mooncake* is over TCP, and *Mooncake alone* without a queue; *memcpy* only copies the same bytes.
- **Figures**: medians, with the smallest and the largest in parentheses. Repetitions of all peers take turns; only in
  the PPO step one peer runs after the other, as all at once need more than 24 GiB. k is thousand, M million, GB 10⁹
  bytes.
- **× 0.1**: how many times better than the release on PyPI, on its SimpleStorage, or on its MooncakeStore where ours
  runs on Mooncake.

![Times better than the release on PyPI](benchmarks.svg)

## One PPO step

{about("ppo")} Through Mooncake 512 rows, as the release fails there at 1024. Seconds; the spread is below.

{step(results)}

## Targets against peers

{comparisons(results)}

## Short of the target

What was measured, and below it what stops it: what the machine itself gives for the same bytes or messages, measured in
the same run. Where that is far above, it is our own work that is left to save.

{short(results).rstrip() or "None."}

## All rows

Ray's get is a read-only view of shared memory; ours and the others give memory that is the reader's own. A put of
memcpy goes into warm memory, its get into new memory. GPUs: [GPU tensors](gpu.md); thousands of clients:
[scale](scale.md); choosing a backend: [backends](backends.md).

{table(results)}"""
    (ROOT / "docs" / "benchmarks.md").write_text(text.rstrip() + "\n")
    (ROOT / "docs" / "benchmarks.svg").write_text(plot(results))
