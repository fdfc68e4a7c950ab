"""The smoke run: small batches against the release on PyPI, judged by ratios recorded earlier.

A ratio holds on machines of any speed, but not exactly: it fails the run only below half of what was recorded, and only
if measuring once more does not mend it, since other work on the machine may have hit one side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bench.protocol import ROOT
from bench.report import ratios
from bench.workloads import SMOKE, workload

RECORD = ROOT / "bench" / "smoke.json"
LEAST = 0.5
TRIES = 3

Run = Callable[[list[str]], dict[str, Any]]


def record(run: Run) -> int:
    """Measure, and write the ratios down as what later runs are judged by."""
    found = ratios(run(list(SMOKE)))
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


def check(run: Run) -> int:
    """Measure and compare. Exit status 1 if a ratio stays below half of the recorded one, or a workload fails."""
    recorded: dict[str, float] = json.loads(RECORD.read_text())
    best: dict[str, float] = {}
    for _ in range(TRIES):
        names = [name for name in SMOKE if _short(recorded, best, name)]
        if not names:
            break
        for metric, ratio in ratios(run(names)).items():
            best[metric] = max(ratio, best.get(metric, 0.0))
    width = max(map(len, recorded))
    for metric, before in recorded.items():
        now = best.get(metric)
        shown = "no result" if now is None else f"{now:8.2f} x"
        mark = "" if now is not None and now >= LEAST * before else "   BELOW HALF OF WHAT WAS RECORDED"
        print(f"{metric:{width}}  {shown}   recorded {before:8.2f} x{mark}")
    short = [name for name in SMOKE if _short(recorded, best, name)]
    if short:
        print(
            f"slower than recorded: {', '.join(short)}. If that is meant, record anew: python -m bench --smoke --record"
        )
    return 1 if short else 0


def _short(recorded: dict[str, float], best: dict[str, float], name: str) -> bool:
    metrics = [f"{name}.{row.metric}" for row in workload(name).rows]
    return any(best.get(metric, 0.0) < LEAST * recorded[metric] for metric in metrics if metric in recorded)
