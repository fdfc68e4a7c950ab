"""Tells a flaky test from a broken one: ``pytest --rerun-failed`` runs what failed once more, by itself.

A test that passes only then is flaky. It fails the run as any other, unless flaky.yaml lists it; both of its outputs
are shown. The exit status is 0 where every failure is flaky and listed. An entry for the test ``*`` allows any tests to
be flaky, ``most`` of them in a run.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

LIST = Path(__file__).with_name("flaky.yaml")
SHOWN = 60
"""Lines of each output."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rerun-failed", action="store_true", help="run what failed once more by itself: flaky or broken?"
    )
    parser.addoption("--outcomes", metavar="FILE", help="write outcome and output of each test, as JSON, to FILE")


class Entry(NamedTuple):
    """Why tests may be flaky, and how many of them in a run."""

    reason: str
    most: int


def listed(today: datetime.date) -> dict[str, Entry]:
    """The entries that hold today, by test."""
    entries = yaml.safe_load(LIST.read_text()) or []
    for entry in entries:
        assert set(entry) - {"most"} == {"test", "owner", "reason", "until"}, f"{LIST}: {entry}"
        assert ("most" in entry) == (entry["test"] == "*"), f"{LIST}: {entry}"
    return {
        entry["test"]: Entry(f"{entry['reason']} ({entry['owner']})", entry.get("most", 1))
        for entry in entries
        if entry["until"] >= today
    }


def permitted(flaky: list[str], allowed: dict[str, Entry]) -> bool:
    """Whether a run may pass with these flaky tests."""
    others = [test for test in flaky if test not in allowed]
    return len(others) <= (allowed["*"].most if "*" in allowed else 0)


def output(report: pytest.TestReport) -> str:
    sections = [f"--- {name} ---\n{content.rstrip()}" for name, content in report.sections if content.strip()]
    return "\n".join([report.longreprtext, *sections] if report.longrepr else sections)


class Reruns:
    """Of the process that reports, not of the workers of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.rerun = config.getoption("--rerun-failed")
        self.outcomes = config.getoption("--outcomes")
        self.seen: dict[str, dict[str, str]] = {}
        self.second: dict[str, dict[str, str]] = {}
        self.broken_files = False
        self.allowed: dict[str, Entry] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.broken_files |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.seen.setdefault(report.nodeid, {"outcome": "passed", "output": ""})
        if before["outcome"] != "failed":
            self.seen[report.nodeid] = {"outcome": report.outcome, "output": output(report)}

    @property
    def first(self) -> dict[str, str]:
        """The output of each test that failed."""
        return {test: seen["output"] for test, seen in self.seen.items() if seen["outcome"] == "failed"}

    def flaky(self) -> list[str]:
        return [test for test in self.first if self.second.get(test, {}).get("outcome") == "passed"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.outcomes:
            Path(self.outcomes).write_text(json.dumps(self.seen))
        if not self.rerun or exitstatus != pytest.ExitCode.TESTS_FAILED or not self.first:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outcomes.json"
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--outcomes={file}",
                *self.first,
            ]
            done = subprocess.run(command, cwd=session.config.rootpath, capture_output=True, text=True)
            self.second = json.loads(file.read_text()) if file.exists() else {}
        if not self.second:
            print(done.stdout, done.stderr)
        self.allowed = listed(datetime.date.today())
        flaky = self.flaky()
        if not self.broken_files and set(flaky) >= set(self.first) and permitted(flaky, self.allowed):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.rerun or not self.first:
            return
        flaky = self.flaky()
        terminalreporter.section("once more, by itself")
        for test in flaky:
            texts = {"first run": self.first[test], "second run": self.second[test]["output"] or "(it printed nothing)"}
            for name, text in texts.items():
                terminalreporter.section(f"{name}: {test}", sep="-")
                terminalreporter.write_line("\n".join(text.splitlines()[-SHOWN:]))
        terminalreporter.section(f"{len(flaky)} flaky, {len(self.first) - len(flaky)} broken", sep="-")
        for test in self.first:
            kind = "flaky " if test in flaky else "broken"
            entry = self.allowed.get(test, self.allowed.get("*")) if test in flaky else None
            allowed = f"  listed: {entry.reason}" if entry else ""
            terminalreporter.write_line(f"{kind}  {test}{allowed}")
