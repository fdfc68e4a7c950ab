from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.storage.conftest import ROOT, Run, assert_all_passed

pytestmark = pytest.mark.timeout(600)


def test_memory_conforms(run_conformance: Run) -> None:
    assert_all_passed(run_conformance("memory"))


def test_mooncake_conforms(run_conformance: Run) -> None:
    assert_all_passed(run_conformance("mooncake"))


def test_installed_package_is_found_and_conforms(run_conformance: Run, redis_package: Path) -> None:
    assert_all_passed(run_conformance("redis", redis_package))


def test_backend_of_no_package_is_refused_with_those_that_there_are(redis_package: Path) -> None:
    program = (
        "import asyncio\n"
        "from transfer_queue.storage.registry import open_backend\n"
        "asyncio.run(open_backend('rediss', None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{redis_package}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "ConfigError: backend 'rediss' is not known; installed backends: mooncake, ray, redis, simple, yuanrong"
        in done.stderr
    )
