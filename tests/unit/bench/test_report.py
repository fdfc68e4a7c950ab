"""What the page of the benchmark says of results: all of it from them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bench import report
from bench.workloads import ORDER, SMOKE, about, workload

PLANS = {name: workload(name) for name in ORDER}


UNLIMITED = {"growth", "status_large", "ratio", "threads_1024"}
"""Rows whose targets hold on any machine: nothing of it could stop them."""


def results(short: bool) -> dict[str, Any]:
    """Of a run in which ours reaches each target, or none."""
    workloads = {}
    for name, plan in PLANS.items():
        samples: dict[str, dict[str, list[float]]] = {peer: {} for peer in plan.peers}
        for row in plan.rows:
            target = row.target or 1.0
            slower = 100.0 if row.better == "lower" else 0.01
            for peer in plan.peers:
                samples[peer][row.metric] = [target * slower]
            ours = 1.0 if not short else 1.5 if row.better == "lower" else 0.6
            samples[plan.ours][row.metric] = [target * ours]
        for against in plan.against:
            base = samples[plan.ours][against.metric][0]
            samples[against.peer][against.metric] = [base * 0.01 if against.peer != plan.ours and short else base]
            if short and against.other != plan.ours:
                samples[against.other][against.metric] = [2 * base if against.target < 1 else base]
        workloads[name] = {"samples": samples, "failed": {}, "load": 0.1}
    machine = {"cores": 3, "cpu": "a CPU", "memory_gib": 8, "kernel": "6", "python": "3.11", "torch": "2.13"}
    return {
        "machine": machine | {"commit": "abc", "started": "today", "load": 0.1},
        "peers": {"ray": "2"},
        "workloads": workloads,
    }


def targets() -> list[str]:
    """In the order of the page."""
    titles = []
    for plan in PLANS.values():
        titles += [row.title for row in plan.rows if row.target is not None]
        titles += [against.title for against in plan.against]
    return titles


def test_every_target_that_is_missed_is_listed_with_a_limit() -> None:
    lines = report.missed(results(short=True))
    assert len(lines) == len(targets())
    assert all(line.startswith(f"{title}: ") for (line, _), title in zip(lines, targets(), strict=True))
    text = report.short(results(short=True))
    assert all(line in text and limit in text for line, limit in lines)
    assert text.count("The caller waits for") == 1, "what stops several targets is said once"
    for row in (row for plan in PLANS.values() for row in plan.rows if row.target is not None):
        if row.metric not in UNLIMITED:
            assert row.limit, f"{row.title} has a target, but does not say what would stop it"


def test_nothing_is_short_where_all_targets_are_reached() -> None:
    reached = results(short=False)
    assert report.missed(reached) == []
    assert "missed" not in report.comparisons(reached)
    assert "missed" not in report.table(reached)


@pytest.mark.parametrize("short", [True, False])
def test_each_measurement_that_a_limit_names_is_one_of_a_workload(short: bool) -> None:
    limits = [row.limit for plan in PLANS.values() for row in plan.rows]
    limits += [against.limit for plan in PLANS.values() for against in plan.against]
    named = {place for limit in limits for place in re.findall(r"\{([\w/]+)\}", limit)}
    assert len(named) > 10
    for limit in limits:
        shown = report.quoted(results(short), limit)
        assert "(not measured)" not in shown
        assert "{" not in shown


def test_a_limit_gives_the_measured_value_with_its_unit_and_says_where_there_is_none() -> None:
    some = results(short=False)
    some["workloads"]["limits"]["samples"]["machine"]["tcp"] = [1.0, 2.5, 3.0]
    assert report.quoted(some, "carries {limits/machine/tcp}, on {machine/cores}") == "carries 2.5 GB/s, on 3"
    del some["workloads"]["limits"]
    assert report.quoted(some, "carries {limits/machine/tcp}") == "carries (not measured)"


def test_tls_that_costs_more_than_35_percent_is_short_of_its_target() -> None:
    for share, short in ((0.66, False), (0.64, True)):
        some = results(short=False)
        samples = some["workloads"]["dense_tcp"]["samples"]
        samples["ours_tls"]["both"] = [share * samples["ours_tcp"]["both"][0]]
        assert any("TLS" in line for line, _ in report.missed(some)) == short


def test_the_ppo_step_is_shown_through_driver_release_and_ours_on_both_backends() -> None:
    header = report.step(results(short=False)).splitlines()[0]
    for peer in ("dataproto_driver", "upstream", "upstream_mooncake", "ours", "ours_mooncake"):
        assert report.LABELS[peer] in header


def test_a_peer_that_failed_is_shown_as_failed_with_its_error() -> None:
    some = results(short=False)
    del some["workloads"]["ppo_mooncake"]["samples"]["upstream_mooncake"]
    some["workloads"]["ppo_mooncake"]["failed"] = {"upstream_mooncake": "no memory"}
    assert "| failed |" in report.step(some)
    assert "failed: `no memory`" in report.table(some)


def test_the_page_has_every_workload_and_row(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    report.render(results(short=False))
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    for name, plan in PLANS.items():
        assert f"### {plan.title}" in page
        assert about(name) in page
        assert all(f"| {row.title} |" in page for row in plan.rows)
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    assert "<svg" in (tmp_path / "docs" / "benchmarks.svg").read_text()


def test_what_the_smoke_run_measures_has_ratios() -> None:
    some = results(short=False)
    some["workloads"] = {name: some["workloads"][name] for name in SMOKE}
    assert {metric.partition(".")[0] for metric in report.ratios(some)} == set(SMOKE)
