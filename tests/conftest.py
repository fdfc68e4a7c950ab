"""Rules for the whole suite. With ``CI=true`` a skipped test is a failed one: CI must run everything.

``make test`` runs it in two processes, as tests wait more than they compute. What shares servers or ports
stays together in one of them: each file by itself, and the folders and files of ``TOGETHER``.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

CI = os.environ.get("CI") == "true"
TOGETHER = {
    "kubernetes": ("tests/cluster/", "tests/integration/operator/"),  # first, as it takes longest
    "ray": ("tests/integration/ray/",),
    "default ports": ("tests/integration/test_demo.py", "tests/integration/test_docs.py"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write golden files anew instead of comparing with them")


def _group(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    return next((name for name, paths in TOGETHER.items() if path.startswith(paths)), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Gives a process whole groups."""

        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _group(item.nodeid) != "kubernetes")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped, but: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if CI:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if CI:
        _fail_if_skipped(report)
    return report
