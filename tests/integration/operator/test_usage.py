"""What the operator learns from the metrics of a controller that really runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.operator.control_plane import free_port
from tests.waiting import wait_until
from tq_operator.runtime.usage import storage_usage

REPOSITORY = Path(__file__).parents[3]


@contextmanager
def server(module: str, settings: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """A server process, once it says that it is ready; gives what it said."""
    config = folder / f"{module}.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", f"transfer_queue.runtime.{module}", "--config", str(config), "--die-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("READY "), line
            yield json.loads(line.removeprefix("READY "))
        finally:
            child.terminate()


def test_the_use_of_all_storage_units_is_added_up(tmp_path: Path) -> None:
    metrics = free_port()
    url = f"http://127.0.0.1:{metrics}/metrics"
    assert storage_usage(url).used is None, "nobody answers"
    with ExitStack() as stack:
        settings = {"host": "127.0.0.1", "port": 0, "metricsPort": metrics}
        controller = stack.enter_context(server("controller", settings, tmp_path))
        assert storage_usage(url).used is None, "no storage unit yet"
        unit = {"host": "127.0.0.1", "port": 0, "controller": [controller["address"]], "capacity": "8Mi"}
        stack.enter_context(server("storage_unit", unit, tmp_path))
        wait_until(lambda: storage_usage(url).used == 0, "the storage unit is there and empty")
