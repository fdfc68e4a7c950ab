"""Shares of other peers' figures in the text about a benchmark."""

from __future__ import annotations

from typing import Any

from bench.report import missed, table

Figures = dict[str, dict[str, list[float]]]


def results(ours: float, rival: float, engine: float) -> dict[str, Any]:
    peers = {"ours_mooncake": ours, "upstream_mooncake": rival, "mooncake_raw": engine}
    samples: Figures = {name: {key: [value] for key in ("put", "get", "both")} for name, value in peers.items()}
    return {"workloads": {"mixed_mooncake": {"samples": samples, "failed": {}, "load": 1.0}}}


def test_a_missed_share_is_told_with_what_ours_runs_on() -> None:
    found = results(ours=0.9, rival=0.4, engine=1.0)
    told = (
        "2.25 times TransferQueue 0.1 (PyPI), MooncakeStore, target 4; Mooncake alone, which ours runs on, reached 2.5"
    )
    [line] = missed(found)
    assert told in line
    assert f"{line} (**missed**)." in table(found)
    assert "mixed put, Mooncake: 0.9 times Mooncake alone, target 0.8 (reached)." in table(found)


def test_a_share_of_what_ours_runs_on_is_missed_below_it() -> None:
    assert len(missed(results(ours=0.79, rival=0.1, engine=1.0))) == 3
    assert missed(results(ours=0.8, rival=0.2, engine=1.0)) == []
