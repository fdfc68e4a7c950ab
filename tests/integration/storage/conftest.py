from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import preloaded
from tests.integration.etcd import etcd_binary

ROOT = Path(__file__).resolve().parents[3]
ETCD = Path(etcd_binary()).parent
SUITE = "transfer_queue.storage.conformance"
Run = Callable[..., "dict[str, str]"]


CASES = {"test_blocks": 18, "test_queue": 13, "test_controllers": 4}
"""In each file of the suite; the same ids for every backend."""
# openYuanrong has no wheel for Python 3.13.
collect_ignore = ["test_yuanrong.py"] if sys.version_info >= (3, 13) else []


def assert_all_passed(outcomes: dict[str, str], files: Sequence[str] = tuple(CASES)) -> None:
    assert set(outcomes.values()) == {"PASSED"}
    assert len(outcomes) == sum(CASES[file] for file in files)


@pytest.fixture
def run_conformance(tmp_path: Path) -> Run:
    """Runs the suite as the author of a backend does; the outcome of each case by its id."""

    def run(
        backend: str, *extra_paths: Path, settings: str = "{}", files: Sequence[str] = tuple(CASES)
    ) -> dict[str, str]:
        paths = os.pathsep.join(map(str, [*extra_paths, ROOT]))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            f"{SUITE}.plugin",
            "-p",
            "tests.integration.storage.forked",
            "-p",
            "no:cacheprovider",
            "-v",
            "--tb=short",
        ]
        done = preloaded.run(
            [
                *(*command, f"--backend={backend}", f"--backend-settings={settings}", "--pyargs", SUITE),
                *(f"--deselect={file}.py" for file in CASES if file not in files),
            ],
            env={**os.environ, "PYTHONPATH": paths, "PATH": f"{os.environ['PATH']}{os.pathsep}{ETCD}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes = dict(re.findall(r"(test_\w+\.py::\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", done.stdout))
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return outcomes

    return run


@pytest.fixture(scope="session")
def redis_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example backend, installed by pip into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    source = tmp_path_factory.mktemp("source") / "redis"
    subprocess.run(["cp", "-r", str(ROOT / "examples/backends/redis"), str(source)], check=True)  # pip writes into it
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)], check=True)
    return target
