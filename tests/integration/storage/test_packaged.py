"""A backend of an installed package of somebody else's, named in ``init(conf)``: nothing else is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import preloaded
from tests.integration.ray.cluster import ENVIRONMENT
from tests.integration.storage.conftest import ROOT

PROGRAM = """
import pathlib
import redis
import transfer_queue as tq
from transfer_queue.storage.registry import backend_servers

with backend_servers("redis", pathlib.Path.cwd()) as settings:
    server = redis.Redis.from_url(settings["url"])
    tq.init({"backend": {"storage_backend": "redis", "redis": {**settings%s}}})
    for number in range(3):
        tq.kv_put(f"k{number}", "train", {"x": number})
    print("rows", list(tq.kv_batch_get(["k2", "k0"], "train")["x"]))
    print("in redis", len(server.keys()) > 0)
    tq.close()
"""

IN_RAY = """
import pathlib
import ray
import transfer_queue as tq
from transfer_queue.storage.registry import backend_servers

@ray.remote(num_cpus=0.1)
def read():
    tq.init()
    return list(tq.kv_batch_get(["k2", "k0"], "train")["x"])

with backend_servers("redis", pathlib.Path.cwd()) as settings:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    tq.init({"backend": {"storage_backend": "redis", "redis": settings}, "ray": {"num_cpus": 0.1}})
    for number in range(3):
        tq.kv_put(f"k{number}", "train", {"x": number})
    print("rows", ray.get(read.remote()))
    tq.close()
    ray.shutdown()
"""


def run(program: str, package: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    for name in ("TQ_CONFIG_FILE", "TQ_CONTROLLER_ADDRESS"):
        environ.pop(name, None)
    return preloaded.run([sys.executable, "-c", program], env=environ, cwd=folder, capture_output=True, text=True)


def test_a_program_names_the_backend_of_an_installed_package(redis_package: Path, tmp_path: Path) -> None:
    done = run(PROGRAM % "", redis_package, tmp_path)
    assert done.stdout == "rows [2, 0]\nin redis True\n", done.stderr


def test_a_program_in_a_ray_cluster_names_it_and_tasks_read_its_rows(redis_package: Path, tmp_path: Path) -> None:
    done = run(IN_RAY, redis_package, tmp_path)
    assert done.stdout == "rows [2, 0]\n", done.stderr


def test_a_wrong_setting_is_named_as_the_package_names_it(redis_package: Path, tmp_path: Path) -> None:
    done = run(PROGRAM % ", 'ulr': 1", redis_package, tmp_path)
    assert done.returncode == 1
    assert "ulr" in done.stderr.splitlines()[-1]


def test_a_misspelt_name_is_refused_with_those_that_packages_bring(redis_package: Path, tmp_path: Path) -> None:
    program = 'import transfer_queue as tq\ntq.init({"backend": {"storage_backend": "rediss", "rediss": {}}})'
    done = run(program, redis_package, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("packages installed here bring: redis")


def test_settings_that_no_other_process_can_be_told_are_refused(redis_package: Path, tmp_path: Path) -> None:
    done = run(PROGRAM % ", 'url': object()", redis_package, tmp_path)
    assert done.returncode == 1
    assert "backend.redis" in done.stderr.splitlines()[-1]


KILLED = """
import os, pathlib, signal, time
from dataclasses import replace
import transfer_queue as tq
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.storage.registry import backend_servers

with backend_servers("redis", pathlib.Path.cwd()) as settings:
    plan = replace(default_plan(units=2, unit_capacity=16 << 20), tls=True)
    plan = replace(plan, controller=plan.controller.model_copy(update={"durability": "node"}))
    plan = plan.with_backend_kind("redis").with_backend_settings(settings)
    with LocalStack(plan, pathlib.Path.cwd() / "queue").start() as stack:
        os.environ["TQ_CONFIG_FILE"] = str(stack.write_attach_config())
        tq.init()
        for number in range(6):
            tq.kv_put(f"k{number}", "train", {"x": number})
        for process in stack.processes:
            os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while len(stack.restarts) < 3 or stack.failure():
            assert time.monotonic() < deadline
            stack.restart_ended()
        print("rows", list(tq.kv_batch_get(["k2", "k0", "k5"], "train")["x"]))
        print("tls", pathlib.Path(tq.get_client().config.security.tls.ca).exists())
        tq.close()
"""


def test_rows_outlive_a_killed_controller_and_killed_units_and_connections_of_the_queue_have_tls(
    redis_package: Path, tmp_path: Path
) -> None:
    done = run(KILLED, redis_package, tmp_path)
    assert done.stdout == "rows [2, 0, 5]\ntls True\n", done.stderr
