"""Runs the benchmark and writes its results: ``python -m bench [--smoke [--record]] [--only WORKLOAD ...] [--long]``.

Repetitions of all peers are interleaved, so that what else this machine does meets all of them alike. A run of all
workloads at full scale writes ``bench/results.json`` and renders ``docs/benchmarks.md``; ``--render`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report, smoke
from bench.environment import PeersNotInstalled, peers_python
from bench.machine import facts, peer_versions
from bench.protocol import OWN, ROOT, PeerError, PeerProcess
from bench.workloads import ORDER, workload

RESULTS = ROOT / "bench" / "results.json"
ANSWER_S = {"full": 240.0, "smoke": 180.0}
"""Seconds within which a peer has to start, if need be, and to do a workload once."""
Samples = dict[str, dict[str, list[float]]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Peers:
    """The peers of this run; each is started when it is first needed and ended when no later workload needs it."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._running: dict[str, PeerProcess] = {}

    def get(self, name: str) -> PeerProcess:
        if name not in self._running:
            self._running[name] = PeerProcess(name, sys.executable if name.startswith(OWN) else self._python)
        return self._running[name]

    def end(self, name: str) -> None:
        """End a peer that failed, even if it hangs; the next workload starts it again."""
        self._running.pop(name).stop()

    def keep(self, names: set[str]) -> None:
        """End all but ``names``."""
        for name in set(self._running) - names:
            self._running.pop(name).stop()


def order(peers: Sequence[str], rounds: range, interleaved: bool) -> list[tuple[int, str]]:
    """(repetition, peer) in the order of the run."""
    if interleaved:
        return [(repetition, peer) for repetition in rounds for peer in peers]
    return [(repetition, peer) for peer in peers for repetition in rounds]


def run_workload(
    name: str, peers: Peers, scale: str, repetitions: int | None, long: bool = False
) -> tuple[Samples, dict[str, str]]:
    """Samples as peer -> metric -> values, and the errors of peers that failed. One untimed repetition goes first."""
    plan = workload(name)
    chosen = plan.compared(scale)
    samples: Samples = {}
    failed: dict[str, str] = {}
    rounds = range(1 + (repetitions or plan.repetitions))
    if plan.interleaved:
        for peer in chosen:
            peers.get(peer)  # they start beside each other, at most during the untimed repetition
    for repetition, peer in order(chosen, rounds, plan.interleaved):
        if peer in failed:
            continue
        if repetition == 0 and not plan.interleaved:
            peers.keep(set())
        try:
            metrics = peers.get(peer).call(f"{name}.measure", ANSWER_S[scale], scale=scale, peer=peer, long=long)
        except PeerError as error:
            failed[peer] = str(error)
            say(f"  {peer} failed: {str(error)[:300]}")
            peers.end(peer)
            continue
        if repetition:
            for metric, value in metrics.items():
                samples.setdefault(peer, {}).setdefault(metric, []).append(value)
    return samples, failed


def run(names: list[str], scale: str, repetitions: int | None, long: bool = False) -> dict[str, Any]:
    python = peers_python()
    results: dict[str, Any] = {"machine": facts(), "peers": peer_versions(python), "scale": scale, "workloads": {}}
    peers = Peers(python)
    try:
        for position, name in enumerate(names):
            at = facts()
            start, load = time.monotonic(), os.getloadavg()[0]
            peers.keep({peer for later in names[position:] for peer in workload(later).compared(scale)})
            samples, failed = run_workload(name, peers, scale, repetitions, long)
            results["workloads"][name] = {"samples": samples, "failed": failed, "load": round(load, 2), "at": at}
            say(f"{name}: {time.monotonic() - start:.0f} s")
    finally:
        peers.keep(set())
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a minute: small batches, judged by recorded ratios")
    parser.add_argument("--record", action="store_true", help="with --smoke: record the ratios instead")
    parser.add_argument("--only", nargs="+", choices=ORDER, help="these workloads; the others keep their results")
    parser.add_argument("--repetitions", type=int, help="of every workload, instead of its own number")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--long", action="store_true", help="measure 4096 and 8192 clients too")
    parser.add_argument("--render", action="store_true", help="only render docs/benchmarks.md from the JSON")
    options = parser.parse_args()
    if options.render:
        report.render(json.loads(options.output.read_text()))
        return 0
    try:
        return _run(options)
    except PeersNotInstalled as error:
        say(str(error))
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.smoke:
        judge = smoke.record if options.record else smoke.check
        return judge(lambda names: run(names, "smoke", options.repetitions or 3))
    results = run(options.only or list(ORDER), "full", options.repetitions, options.long)
    fresh = results["workloads"]
    if options.only and options.output.exists():
        kept = json.loads(options.output.read_text())["workloads"]
        results["workloads"] = {name: (kept | fresh)[name] for name in ORDER if name in kept | fresh}
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.output == RESULTS:
        report.render(results)
    print(report.table({**results, "workloads": fresh}))
    failed = [name for name, of in results["workloads"].items() if workload(name).ours in of["failed"]]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
