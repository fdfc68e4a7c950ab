"""The smoke run: small batches against the release on PyPI, judged by ratios recorded earlier.

A ratio holds on machines of any speed, but not exactly: it fails the run only below half of what was recorded, and only
if measuring once more does not mend it, since other work on the machine may have hit one side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.protocol import ROOT
from bench.report import LABELS, ratios
from bench.workloads import SMOKE

RECORD = ROOT / "bench" / "smoke.json"
LEAST = 0.5
TRIES = 3
PATIENCE_S = 600.0
"""No further try after this time: a peer that does not answer must not hold up who waits for the outcome."""

Run = Callable[[list[str]], dict[str, Any]]


def record(run: Run, path: Path = RECORD) -> int:
    """Measure, and write the ratios down as what later runs are judged by. Exit status 1 if a peer failed.

    Of ``TRIES`` measurements the lowest counts, as a later one that is merely unlucky must not fall below half of it.
    """
    found: dict[str, float] = {}
    for _ in range(TRIES):
        results = run(list(SMOKE))
        if failures := _failures(results):
            print("\n".join(["nothing recorded:", *failures]))
            return 1
        for metric, ratio in ratios(results).items():
            found[metric] = min(ratio, found.get(metric, ratio))
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


def check(run: Run, path: Path = RECORD) -> int:
    """Measure and compare. Exit status 1 if a ratio stays below half of the recorded one, or a workload fails."""
    recorded: dict[str, float] = json.loads(path.read_text())
    best: dict[str, float] = {}
    failures: list[str] = []
    began = time.monotonic()
    for attempt in range(TRIES):
        names = [name for name in SMOKE if _short(recorded, best, name)]
        if not names or (attempt and time.monotonic() - began > PATIENCE_S):
            break
        results = run(names)
        failures = _failures(results)
        for metric, ratio in ratios(results).items():
            best[metric] = max(ratio, best.get(metric, 0.0))
    width = max(map(len, recorded))
    for metric, before in recorded.items():
        now = best.get(metric)
        shown = "no result " if now is None else f"{now:8.2f} x"
        mark = "" if now is not None and now >= LEAST * before else "   BELOW HALF OF WHAT WAS RECORDED"
        print(f"{metric:{width}}  {shown}   recorded {before:8.2f} x{mark}")
    short = [name for name in SMOKE if _short(recorded, best, name)]
    if short:
        print(f"short of what was recorded: {', '.join(short)}", *failures, sep="\n")
        print("If this version is meant to be slower, record it again: python -m bench --smoke --record")
    return 1 if short else 0


def _failures(results: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {LABELS[peer]} failed: {error}"
        for name, of in results["workloads"].items()
        for peer, error in of["failed"].items()
    ]


def _short(recorded: dict[str, float], best: dict[str, float], name: str) -> bool:
    return any(
        best.get(metric, 0.0) < LEAST * before
        for metric, before in recorded.items()
        if metric.partition(".")[0] == name
    )
