"""``tq bench``: figures of backends on this machine, and what it says of those that it cannot measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)


def tq(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transfer_queue.cli", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **({"PATH": path} if path is not None else {})},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("backend", ["simple", "mooncake"])
def test_each_kind_of_batch_gets_a_figure_and_the_machine_is_named(backend: str) -> None:
    done = tq("--backend", backend, "--size", "1", "--rounds", "1", "--output", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(each["backend"], each["batch"]) for each in report["figures"]] == [(backend, "dense"), (backend, "mixed")]
    assert all(each["put"] > 0 and each["get"] > 0 for each in report["figures"])
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["load"] >= 0
    assert report["missing"] == {}
    assert done.stderr == f"measuring {backend}\n"  # nothing of the engine's log


def test_backend_that_is_not_known_is_refused_with_those_that_are() -> None:
    done = tq("--backend", "redis-cluster")
    assert done.returncode != 0
    assert '--backend: "redis-cluster" is not known; use all, ' in done.stderr


def test_backend_that_cannot_be_started_is_named_with_the_reason(tmp_path: Path) -> None:
    done = tq("--backend", "yuanrong", path=str(tmp_path))
    assert done.returncode != 0
    reason = "etcd is not on the PATH" if sys.version_info < (3, 13) else "pip install 'TransferQueue[yuanrong]'"
    assert reason in done.stderr
