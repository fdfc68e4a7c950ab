"""What the page's memory costs a controller: ``python -m bench.history [--partitions 20000] [--rows 1000000]``.

``--pairs N`` measures a whole queue instead: N times with the memory and without it, in turn, the processor time of the
controller for a request and the requests a second of one client that puts rows and gets them, one at a time.

The real core holds the rows, without sockets; requests wait in 1000 partitions. Each simulated second every partition
gets a put and a fetch, then the observer samples. Prints one JSON object: bytes of the rings, milliseconds of a sample
and of an answer to the page, microseconds that a put and a fetch pay for being counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from statistics import median
from time import monotonic, perf_counter, process_time

import psutil
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control import ControlCore
from transfer_queue.control.commands import BlockRef, Command, Commit, Fetch, Reply
from transfer_queue.control.schema import FieldSchema
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.observer import Observer

__all__ = ["main", "measure"]

_WAITING, _BATCH = 1000, 8
_CLIENT = "client"


def measure(partitions: int, rows: int, seconds: int) -> dict[str, float]:
    """Figures by name, with their unit."""
    loop = asyncio.new_event_loop()
    try:
        return _measure(Controller(ControllerConfig(), ControlCore(), loop), partitions, rows, seconds)
    finally:
        loop.close()


def _measure(controller: Controller, partitions: int, rows: int, seconds: int) -> dict[str, float]:
    core = controller.core
    each = rows // partitions
    core.unit_joined(1, [], 0.0)
    fields = [FieldSchema("tokens", "ragged", "int64", (None,))]
    block = 0

    def put(partition: int, count: int) -> Command:
        nonlocal block
        block += 1
        return Commit(f"step_{partition}", append=count, fields=fields, blocks=[BlockRef(1, block, 0, count, 1000)])

    for partition in range(partitions):
        core.apply(put(partition, each), 0.0, client=1, request=0)
    for partition in range(_WAITING):
        waiting = Fetch(
            f"step_{partition}", fields=["tokens", "reward"], batch_size=_BATCH, task="trainer", timeout_s=1e6
        )
        core.apply(waiting, monotonic(), client=2, request=partition)
    observer = Observer(controller)
    counted: list[float] = []
    samples: list[float] = []
    for second in range(seconds):
        done: list[tuple[Command, Reply]] = []
        for partition in range(partitions):
            for command in (put(partition, 1), Fetch(f"step_{partition}", fields=["tokens"], batch_size=1, task="ref")):
                reply = core.apply(command, monotonic(), client=1, request=0)
                assert isinstance(reply, Reply)
                done.append((command, reply))
        core.drain_effects()
        started = process_time()
        for command, reply in done:
            observer.answered(_CLIENT, command, reply, started, started)
        counted.append((process_time() - started) / len(done))
        started = process_time()
        observer.sample(observer._began + second + 1)
        samples.append(process_time() - started)
    started = process_time()
    observer.view(86400, "step_0")
    answer = process_time() - started
    return {
        "partitions": partitions,
        "rows": core.state.rows,
        "waiting_requests": len(core.wait_queue),
        "rings_mb": round(observer.history.nbytes / 1e6, 2),
        "sample_ms_median": round(1000 * median(samples), 2),
        "sample_ms_highest": round(1000 * max(samples), 2),
        "answer_ms": round(1000 * answer, 2),
        "counting_us_per_request": round(1e6 * median(counted), 2),
    }


def measure_pairs(pairs: int, requests: int) -> dict[str, float]:
    """Medians with and without the memory, and the cost: the median over the pairs, in percent."""
    turns: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(pairs):
        for remembers in (True, False) if pair % 2 else (False, True):
            turns[remembers].append(_turn(remembers, requests))
    cpu, rate = (
        median(with_it[place] / without[place] - 1 for with_it, without in zip(turns[True], turns[False], strict=True))
        for place in (0, 1)
    )
    return {
        "pairs": pairs,
        "controller_us_without": round(median(turn[0] for turn in turns[False]), 1),
        "controller_us_with": round(median(turn[0] for turn in turns[True]), 1),
        "controller_cost_percent": round(100 * cpu, 1),
        "requests_per_s_without": round(median(turn[1] for turn in turns[False])),
        "requests_per_s_with": round(median(turn[1] for turn in turns[True])),
        "throughput_change_percent": round(100 * rate, 1),
    }


def _turn(remembers: bool, requests: int) -> tuple[float, float]:
    """Microseconds of the controller for a request, requests a second."""
    tq.init({"metrics": {"enabled": remembers}})
    try:
        client = tq.get_client()
        data = TensorDict({"tokens": torch.ones(1, 16)}, [1])
        (controller,) = (
            child
            for child in psutil.Process().children(recursive=True)
            if "transfer_queue.runtime.controller" in child.cmdline()
        )

        def go(count: int) -> None:
            for number in range(count // 2):
                client.put(data, partition_id=f"step_{number % 8}")
                client.get_meta(["tokens"], 1, f"step_{number % 8}", task_name="trainer", timeout=60)

        go(requests // 10)
        before, started = controller.cpu_times(), perf_counter()
        go(requests)
        after, lasted = controller.cpu_times(), perf_counter() - started
        return 1e6 * (after.user + after.system - before.user - before.system) / requests, requests / lasted
    finally:
        tq.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--partitions", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=20, help="Samples to take.")
    parser.add_argument("--pairs", type=int, default=0, help="Measure a whole queue with and without it.")
    parser.add_argument("--requests", type=int, default=4000, help="Of each turn of --pairs.")
    arguments = parser.parse_args()
    if arguments.pairs:
        print(json.dumps(measure_pairs(arguments.pairs, arguments.requests), indent=2))
        return
    print(json.dumps(measure(arguments.partitions, arguments.rows, arguments.seconds), indent=2))


if __name__ == "__main__":
    main()
