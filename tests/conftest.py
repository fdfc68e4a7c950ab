"""Rules for the whole suite. With ``CI=true`` a skipped test is a failed one: CI must run everything.

A failed test says how to repeat it, and where the logs of its servers lie: ``artefacts``. ``reruns`` tells a flaky test
from a broken one.

``make test`` runs it in three processes, as tests wait for a part of their time. What shares servers or ports
stays together in one of them: each file by itself, and the folders and files of ``TOGETHER``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import artefacts, orphans, reruns

CI = os.environ.get("CI") == "true"
TOGETHER = {
    "kubernetes": ("tests/cluster/", "tests/integration/operator/"),
    "ray": ("tests/integration/ray/",),
    "default ports": ("tests/integration/test_demo.py", "tests/integration/test_docs.py"),
}
LONGEST = ("kubernetes", "tests/rdma/test_rdma.py", "ray", "default ports")
"""They begin first, and many short files come last, so that the processes end together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write golden files instead of comparing with them")
    reruns.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    orphans.watch()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(reruns.Reruns(config), "reruns")


# A failed property names the example that breaks it, which is its seed. A busy machine makes no property fail.
settings.register_profile(
    "tests",
    settings.get_profile(settings.get_current_profile_name()),
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("tests")


def _group(nodeid: str) -> str:
    path = nodeid.partition("::")[0]
    return next((name for name, paths in TOGETHER.items() if path.startswith(paths)), path)


def _turn(group: str) -> int:
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


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
        items.sort(key=lambda item: _turn(_group(item.nodeid)))


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        report.outcome = "failed"
        report.longrepr = f"with CI=true nothing may be skipped, but: {reason}"


def pytest_runtest_logstart() -> None:
    artefacts.next_test()


def _repeat(nodeid: str) -> str:
    """The command that runs the test again, with the seeds that were set."""
    seeds = [f"{name}={shlex.quote(value)} " for name, value in sorted(os.environ.items()) if _sets_a_seed(name)]
    return f"{''.join(seeds)}make test PATHS={shlex.quote(nodeid)}"


def _sets_a_seed(name: str) -> bool:
    return name.startswith(("TQ_CHAOS_", "TQ_FUZZ_")) or name in ("TQ_SEEDS", "TQ_FIRST_SEED")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if CI:
        _fail_if_skipped(report)
    if report.failed:
        folder = getattr(item, "funcargs", {}).get("tmp_path")
        files = f"{folder}\n" if folder is not None and any(folder.iterdir()) else ""
        found = files + artefacts.write(item.nodeid)
        report.sections += [("artefacts", found)] if found else []
        report.sections.append(("to repeat", _repeat(item.nodeid)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if CI:
        _fail_if_skipped(report)
    return report
