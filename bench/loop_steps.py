"""How long a controller's loop is busy at a stretch: ``python -m bench.loop_steps [--rows N] [--partitions N]``.

For each kind of request, milliseconds of processor time of the longest steps of the loop. Unlike the waits that the
workload ``stalls`` measures, they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue import TransferQueueClient
from transfer_queue.client.engine import Engine
from transfer_queue.client.operation import Operation
from transfer_queue.client.rows import request_in_parts
from transfer_queue.config.document import validate_document
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import (
    Acknowledge,
    BlockRef,
    Clear,
    Commit,
    ConsumptionStatus,
    Fetch,
    KeysOf,
    ListKeys,
    ListPartitions,
    Lookup,
    ProductionStatus,
    ResetConsumption,
    SetTags,
    Snapshot,
)
from transfer_queue.control.schema import FieldSchema
from transfer_queue.runtime import controller
from transfer_queue.wire.messages import Capture, Look

_AT_ONCE = 5000
"""Rows of a put."""
_TIMEOUT_S = 300.0


class Steps:
    """A controller in a thread of this process, whose loop is measured."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._longest: list[float] = []
        self._ready = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()
        self._ready.wait(60)

    def _serve(self) -> None:
        thread, run = threading.get_ident(), asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run(handle)
            if threading.get_ident() == thread:
                self._longest.append(time.thread_time() - start)

        def announce(**facts: Any) -> None:
            self.facts = facts
            self._ready.set()

        gc.freeze()  # as servers do
        gc.set_threshold(50_000, 20, 100)
        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        controller.announce_ready = announce  # type: ignore[attr-defined]
        settings = {"port": 0, "metricsPort": 0, "expectedUnits": 0}
        path = Path(tempfile.mkdtemp()) / "controller.json"
        path.write_text(json.dumps(settings))
        config = validate_document(ControllerConfig, settings, "bench")
        asyncio.new_event_loop().run_until_complete(controller.serve(config, asyncio.Event(), str(path)))

    def of(self, what: Callable[[], object]) -> list[float]:
        """Milliseconds of the three longest steps while ``what`` is done."""
        self._longest.clear()
        what()
        return [round(seconds * 1e3, 1) for seconds in sorted(self._longest, reverse=True)[:3]]


def measure(rows: int, partitions: int) -> dict[str, list[float]]:
    """Fill a controller with ``rows`` in one partition, and others of one row, and ask it for everything."""
    steps = Steps()
    client = TransferQueueClient("bench", steps.facts["address"])
    engine = client.engine
    assert isinstance(engine, Engine)
    keys = [f"a-key-of-a-row-{number}" for number in range(rows)]

    def do(work: Any) -> Any:
        return client.run(lambda: Operation(work, lambda result: result))

    def ask(command: Any) -> Any:
        return do(engine.request(command, _TIMEOUT_S))

    def put(partition: str, names: list[str]) -> None:
        ask(Commit(partition, keys=names, tags=[{"step": 1}] * len(names)))

    def write(start: int) -> None:
        block = BlockRef(0, (engine._session.writer << 32) + start + 1, 0, len(keys[start : start + _AT_ONCE]), 8)
        field = FieldSchema("x", "dense", "int64", (1,))
        ask(Commit("large", keys=keys[start : start + _AT_ONCE], fields=[field], blocks=[block]))

    def get(path: str) -> None:
        with urllib.request.urlopen(f"http://{steps.facts['metrics']}{path}", timeout=_TIMEOUT_S) as answer:
            answer.read()

    def put_rows() -> None:
        for start in range(0, rows, _AT_ONCE):
            put("large", keys[start : start + _AT_ONCE])

    def put_partitions() -> None:
        for number in range(partitions):
            put(f"step-{number}", ["key"])

    def write_fields() -> None:
        for start in range(0, rows, _AT_ONCE):
            write(start)

    indexes = b""

    def look_up() -> None:
        nonlocal indexes
        indexes = do(engine.lookup(Lookup("large"), _TIMEOUT_S)).indexes

    half = rows // 2
    works: dict[str, Callable[[], object]] = {
        "put rows": put_rows,
        "put partitions": put_partitions,
        "write fields": write_fields,
        "look up all rows": look_up,
        "look up by index": lambda: do(engine.lookup(Lookup("large", indexes=indexes, fields=["x"]), _TIMEOUT_S)),
        "list keys": lambda: ask(ListKeys("")),
        "list partitions": lambda: ask(ListPartitions("")),
        "keys of": lambda: ask(KeysOf("large", indexes)),
        "production status": lambda: ask(ProductionStatus("large", ["x"])),
        "counts of a partition": lambda: ask(Snapshot("large")),
        "counts of all": lambda: ask(Snapshot("")),
        "tq top": lambda: do(engine.ask(Look(), _TIMEOUT_S)),
        "metrics": lambda: get("/metrics"),
        "page": lambda: get("/api/dataflow"),
        "first fetch of a task": lambda: do(engine.fetch(Fetch("large", ["x"], 1, "task"), _TIMEOUT_S)),
        "fetch 8192 rows": lambda: do(engine.fetch(Fetch("large", ["x"], 8192, "task"), _TIMEOUT_S)),
        "acknowledge": lambda: do(request_in_parts(engine, Acknowledge("large", "other", indexes), _TIMEOUT_S)),
        "consumption status": lambda: ask(ConsumptionStatus("large", "other")),
        "reset consumption": lambda: ask(ResetConsumption("large")),
        "set tags": lambda: do(request_in_parts(engine, SetTags("large", indexes, [{"a": 1}] * rows), _TIMEOUT_S)),
        "checkpoint": lambda: do(engine.transfer(Capture(), [], _TIMEOUT_S)),
        "clear half": lambda: do(request_in_parts(engine, Clear("large", keys=keys[:half]), _TIMEOUT_S)),
        "clear the partition": lambda: ask(Clear("large")),
    }
    return {name: steps.of(work) for name, work in works.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=20_000)
    options = parser.parse_args()
    for name, found in measure(options.rows, options.partitions).items():
        print(f"{name:24}", *(f"{value:8}" for value in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
