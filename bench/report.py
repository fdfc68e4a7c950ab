"""Results as text: the table, ratios, and ``docs/benchmarks.md`` with its plot. Only ever written from the JSON."""

from __future__ import annotations

import statistics
from html import escape
from math import log10
from typing import Any

from bench.protocol import ROOT
from bench.workloads import Row, Share, workload

LABELS = {
    "ours": "TransferQueue",
    "ours_tcp": "TransferQueue, TCP",
    "ours_tls": "TransferQueue, TLS",
    "ours_mooncake": "TransferQueue, Mooncake",
    "upstream": "TransferQueue 0.1 (PyPI)",
    "upstream_mooncake": "TransferQueue 0.1 (PyPI), MooncakeStore",
    "mooncake_raw": "Mooncake alone",
    "mooncake_packed": "Mooncake alone, packing included",
    "ray_store": "Ray, numpy columns",
    "ray_driver": "Ray driver, no queue: TensorDict",
    "dataproto_driver": "Ray driver, no queue: DataProto",
    "redis_server": "redis",
    "flight": "Arrow Flight",
    "memcpy": "memcpy, one thread",
}


def number(value: float) -> str:
    """Three significant digits; thousands as k, millions as M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def median(results: dict[str, Any], name: str, peer: str, metric: str) -> float | None:
    values = results["workloads"][name]["samples"].get(peer, {}).get(metric)
    return statistics.median(values) if values else None


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


def share(results: dict[str, Any], name: str, of: Share) -> tuple[bool, str]:
    """Whether ours has the wanted share of another peer's figure, and a sentence that says so."""
    plan = workload(name)
    row = next(row for row in plan.rows if row.metric == of.metric)
    ours, theirs = (median(results, name, peer, of.metric) for peer in (plan.ours, of.peer))
    if not ours or not theirs:
        return False, f"{row.title}: no result beside {LABELS[of.peer]}"
    reached = ours >= of.least * theirs
    said = f"{row.title}: {number(ours / theirs)} times {LABELS[of.peer]}, target {number(of.least)}"
    bound = median(results, name, of.bound, of.metric) if of.bound else None
    if not reached and bound and of.bound:
        said += f"; {LABELS[of.bound]}, which ours runs on, reached {number(bound / theirs)} times"
    return reached, said


def _when(of: dict[str, Any]) -> str:
    at = of.get("at")
    measured = f" Measured {at['started']}, commit {at['commit']}." if at else ""
    return f"Load average before: {of['load']}.{measured}"


def table(results: dict[str, Any]) -> str:
    """Markdown: one table a workload."""
    lines: list[str] = []
    for name, of in results["workloads"].items():
        plan = workload(name)
        lines += [f"### {plan.title}", "", _when(of), ""]
        lines += ["| | unit | target | " + " | ".join(LABELS[peer] for peer in plan.peers) + " | × 0.1 |"]
        lines += ["|---" * (len(plan.peers) + 4) + "|"]
        for row in plan.rows:
            cells = " | ".join(cell(results, name, peer, row.metric) for peer in plan.peers)
            better = advantage(results, name, row, plan.rival)
            times = f"{number(better)}x" if better else ""
            lines += [f"| {row.title} | {row.unit} | {verdict(results, name, row)} | {cells} | {times} |"]
        for of_peer in plan.shares:
            reached, said = share(results, name, of_peer)
            lines += ["", f"{said} ({'reached' if reached else '**missed**'})."]
        lines += ["", *(f"{LABELS[peer]} failed: `{error[:300]}`" for peer, error in of["failed"].items()), ""]
    return "\n".join(lines)


def missed(results: dict[str, Any]) -> list[str]:
    """One line a row that is short of its target."""
    lines = []
    for name in results["workloads"]:
        for row in workload(name).rows:
            if "missed" in verdict(results, name, row):
                value = median(results, name, workload(name).ours, row.metric)
                shown = "no result" if value is None else f"{number(value)} {row.unit}"
                lines.append(f"{row.title}: {shown}, target {number(row.target or 0)} {row.unit}")
        said = (share(results, name, each) for each in workload(name).shares)
        lines += [sentence for reached, sentence in said if not reached]
    return lines


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """``workload.metric`` -> how many times better ours is than its rival, rounded to three digits."""
    found = {}
    for name in results["workloads"]:
        plan = workload(name)
        for row in plan.rows:
            better = advantage(results, name, row, plan.rival)
            if better is not None:
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
    short = missed(results)
    text = f"""# Benchmarks

Made by `make bench`; do not edit. Medians, with the smallest and the largest in parentheses; repetitions of all peers
interleaved in one run; in the PPO step one peer runs after the other, as all at once need more than 24 GiB.
"× 0.1": how many times better than the release on PyPI, on its SimpleStorage, or on its MooncakeStore where ours runs
on Mooncake.

{machine["cores"]} cores of {machine["cpu"]}, {machine["memory_gib"]} GiB, Linux {machine["kernel"]}, Python
{machine["python"]}, torch {machine["torch"]}; commit {machine["commit"]}, {machine["started"]}; load average
**{machine["load"]}** at the start. What else runs on the machine slows all peers, but not all alike.
Peers: {", ".join(f"{name} {version}" for name, version in peers.items())}.

![Times better than the release on PyPI](benchmarks.svg)

Ray's get is a read-only view of shared memory; ours and the others give memory that is the reader's own. A put of
memcpy goes into warm memory, its get into new memory. {LABELS["mooncake_raw"]} puts from and gets into a buffer that
was registered before and holds the batch already; {LABELS["mooncake_packed"]} copies the user's arrays into it first.

## Short of the target

{chr(10).join(f"- {line}" for line in short) or "None."}

## All rows

{table(results)}"""
    (ROOT / "docs" / "benchmarks.md").write_text(text.rstrip() + "\n")
    (ROOT / "docs" / "benchmarks.svg").write_text(plot(results))
