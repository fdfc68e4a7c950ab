from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import preloaded
from tests.integration.storage.conftest import ETCD, ROOT, Run, assert_all_passed

pytestmark = pytest.mark.timeout(600)


BACKENDS = ["memory", "mooncake", "yuanrong", "ray", "redis"]
"""``redis`` is found as an installed package of somebody else's."""
if sys.version_info >= (3, 13):  # openYuanrong has no wheel for it
    BACKENDS.remove("yuanrong")


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_conforms(run_conformance: Run, redis_package: Path, backend: str) -> None:
    assert_all_passed(run_conformance(backend, redis_package))


def test_ray_conforms_with_blocks_that_go_by_our_tensor_transport(run_conformance: Run) -> None:
    """Its other way of bytes; what happens to controllers is the same as without it."""
    files = ("test_blocks", "test_queue")
    assert_all_passed(run_conformance("ray", settings='{"transport": "transferqueue"}', files=files), files)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_servers_of_a_killed_test_run_end(backend: str, redis_package: Path, tmp_path: Path) -> None:
    program = (
        "import sys, psutil, pathlib\n"
        "from transfer_queue.storage.registry import backend_servers\n"
        "with backend_servers(sys.argv[1], pathlib.Path.cwd()):\n"
        "    children = psutil.Process().children(recursive=True)\n"
        "    print(*(child.pid for child in children), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    paths = os.pathsep.join([str(redis_package), str(ROOT)])
    with preloaded.Popen(
        [sys.executable, "-c", program, backend],
        env={**os.environ, "PYTHONPATH": paths, "PATH": f"{os.environ['PATH']}{os.pathsep}{ETCD}"},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        pids = map(int, process.stdout.readline().split())
        found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        process.kill()
    assert len(found) >= 2
    assert psutil.wait_procs(found, timeout=90)[1] == []


def test_backend_of_no_package_is_refused_with_those_that_there_are(redis_package: Path) -> None:
    program = (
        "import asyncio\n"
        "from transfer_queue.storage.registry import open_backend\n"
        "asyncio.run(open_backend('rediss', None))"
    )
    done = preloaded.run(
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
