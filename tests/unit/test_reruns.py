"""What failed runs once more by itself; a test that passes only then fails the run, unless it is listed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import preloaded

CONFTEST = """
import pathlib
from tests import reruns
reruns.LIST = pathlib.Path("flaky.yaml")
def pytest_addoption(parser):
    reruns.add_options(parser)
def pytest_configure(config):
    config.pluginmanager.register(reruns.Reruns(config))
"""
FLAKY = """
import pathlib
def test_flaky():
    again = pathlib.Path("ran").exists()
    pathlib.Path("ran").touch()
    print("second" if again else "first")
    assert again
"""
BROKEN = "def test_broken():\n    assert False\n"
ANY = "[{{test: '*', most: {}, owner: me, reason: races, until: 9999-01-01}}]"
LISTED = "[{{test: 'test_it.py::test_flaky', owner: me, reason: a race, until: {}}}]"


@pytest.mark.parametrize(
    ("tests", "listed", "status", "verdict"),
    [
        (FLAKY, "[]", 1, "1 flaky, 0 broken"),
        (FLAKY, LISTED.format("9999-01-01"), 0, "1 flaky, 0 broken"),
        (FLAKY, LISTED.format("2020-01-01"), 1, "1 flaky, 0 broken"),
        (FLAKY, ANY.format(1), 0, "1 flaky, 0 broken"),
        (FLAKY, ANY.format(0), 1, "1 flaky, 0 broken"),
        (FLAKY + BROKEN, LISTED.format("9999-01-01"), 1, "1 flaky, 1 broken"),
    ],
    ids=["flaky", "listed", "listed until a day that has passed", "one of any", "more than any", "beside a broken one"],
)
def test_a_flaky_test_fails_the_run_unless_it_is_listed(
    tests: str, listed: str, status: int, verdict: str, tmp_path: Path
) -> None:
    files = {"conftest.py": CONFTEST, "test_it.py": tests, "flaky.yaml": listed, "pytest.ini": "[pytest]\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    environ = {**os.environ, "PYTHONPATH": str(preloaded.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "--rerun-failed"]
    done = preloaded.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert verdict in done.stdout
    shown = done.stdout.partition("once more, by itself")[2]
    assert "first\n" in shown
    assert "second\n" in shown
