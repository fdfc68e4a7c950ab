"""Writes docs/metrics.md from the catalog: ``python -m transfer_queue.runtime.metrics_page [--check] FILE``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transfer_queue.runtime.counters import BOUNDS_S
from transfer_queue.runtime.metrics import CATALOG, MOST_PARTITIONS, MOST_TASKS, MetricInfo

__all__ = ["main", "page"]

_ENDINGS = {"gauge": "", "counter": "_total", "histogram": "_bucket, _sum, _count"}
_HEAD = f"""# Metrics

<!-- Made by `make generate` from transfer_queue/runtime/metrics.py; do not edit. -->

Every server answers `GET /metrics` on its metrics port (`spec.controller.metricsPort`, `spec.storage.metricsPort`) in
Prometheus' text format. The names below are stable: one is renamed or removed only with a new minor version, and the
changelog says so. On Linux each server adds the usual `process_` metrics: memory, CPU time, open files and their limit.

Partitions come and go with training steps, so only the newest {MOST_PARTITIONS} have series of their own, with the
newest {MOST_TASKS} tasks of each; totals count all. Histograms have buckets up to
{", ".join(f"{bound:g}" for bound in BOUNDS_S)} seconds. The mooncake_master has metrics of its own on
`spec.backend.mooncake.master.metricsPort`; they are Mooncake's and may change with it.
"""


def page() -> str:
    """The page as Markdown."""
    lines = [_HEAD]
    for server, title in (("controller", "Controller"), ("storage unit", "Storage unit")):
        lines += [f"## {title}", "", "| metric | kind | labels | what it tells |", "|---|---|---|---|"]
        lines += [_row(info) for info in CATALOG.values() if server in info.servers]
        lines.append("")
    return "\n".join(lines)


def _row(info: MetricInfo) -> str:
    names = ", ".join(f"`{info.name}{ending.strip()}`" for ending in _ENDINGS[info.kind].split(","))
    labels = ", ".join(f"`{label}`" for label in info.labels) or "–"
    return f"| {names} | {info.kind} | {labels} | {info.text} |"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if ``--check`` finds the file out of date."""
    parser = argparse.ArgumentParser(prog="python -m transfer_queue.runtime.metrics_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file differs")
    parser.add_argument("file", type=Path, help="the page")
    options = parser.parse_args(arguments)
    file: Path = options.file
    if options.check:
        if not file.exists() or file.read_text() != page():
            print(f"{file} is out of date; run: make generate", file=sys.stderr)
            return 1
        return 0
    file.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
