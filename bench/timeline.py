"""What the page's timeline costs a queue: ``python -m bench.timeline [--pairs 40]``.

Two queues run at once, of which one has no timeline. One client puts rows and gets them, one at a time, in short turns
with one queue and then the other, in changing order. Prints one JSON object: the requests a second and the processor
time of the controllers for a request, and the cost, the median over the pairs, with the range of its middle half.

``--config`` is for the servers: the controller without the timeline is this module.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch
from tensordict import TensorDict

from transfer_queue import TransferQueueClient
from transfer_queue.config.document import Document
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.launch.process import ServerProcess
from transfer_queue.runtime import controller
from transfer_queue.runtime.timeline import Timeline

__all__ = ["main", "measure"]

_PARTITIONS = 8


class _WithoutTimeline(LocalStack):
    def _spawn(self, name: str, module: str, config: Document) -> ServerProcess:
        if module == "runtime.controller":
            return ServerProcess(name, "bench.timeline", config, self.directory)
        return super()._spawn(name, module, config)


class _Turn(NamedTuple):
    seconds: float
    processor_s: float


def _serve_without() -> int:
    """The controller, whose timeline keeps nothing and looks at nothing."""
    for name in ("put", "get", "wait"):
        setattr(Timeline, name, lambda *arguments: None)
    return controller.main()


class _Queue:
    def __init__(self, stack: LocalStack) -> None:
        self._process = psutil.Process(stack.processes[0].pid)
        self._client = TransferQueueClient("bench", stack.attach_config)
        self._data = TensorDict({"tokens": torch.ones(1, 16)}, [1])

    def turn(self, requests: int) -> _Turn:
        before, started = self._process.cpu_times(), perf_counter()
        for number in range(requests // 2):
            partition = f"step_{number % _PARTITIONS}"
            self._client.put(self._data, partition_id=partition)
            self._client.get_meta(["tokens"], 1, partition, task_name="trainer", timeout=60)
        lasted, after = perf_counter() - started, self._process.cpu_times()
        for number in range(_PARTITIONS):
            self._client.clear_partition(f"step_{number}")
        return _Turn(lasted, after.user + after.system - before.user - before.system)

    def close(self) -> None:
        self._client.close()


def measure(pairs: int, requests: int) -> dict[str, Any]:
    """Figures by name, with their unit."""
    turns: dict[bool, list[_Turn]] = {True: [], False: []}
    with ExitStack() as running:
        queues = {}
        for timeline, kind in ((True, LocalStack), (False, _WithoutTimeline)):
            stack = running.enter_context(kind(default_plan(units=1, unit_capacity=64 << 20)).start())
            queues[timeline] = _Queue(stack)
            running.callback(queues[timeline].close)
            queues[timeline].turn(requests)  # warms up
        for pair in range(pairs):
            for timeline in (True, False) if pair % 2 else (False, True):
                turns[timeline].append(queues[timeline].turn(requests))
    both = list(zip(turns[True], turns[False], strict=True))
    slower = [100 * (with_it.seconds / without.seconds - 1) for with_it, without in both]
    busy = {timeline: 1e6 * sum(turn.processor_s for turn in turns[timeline]) / requests / pairs for timeline in turns}
    low, _, high = quantiles(slower, n=4)
    return {
        "pairs": pairs,
        "requests_of_a_turn": requests,
        "requests_per_s_with": round(median(requests / turn.seconds for turn in turns[True])),
        "requests_per_s_without": round(median(requests / turn.seconds for turn in turns[False])),
        "throughput_cost_percent": round(median(slower), 2),
        "throughput_cost_percent_middle_half": [round(low, 2), round(high, 2)],
        "controller_us_with": round(busy[True], 2),
        "controller_us_without": round(busy[False], 2),
        "controller_cost_percent": round(100 * (busy[True] / busy[False] - 1), 2),
    }


def main() -> int:
    if "--config" in sys.argv:
        return _serve_without()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=2000, help="Of each turn: half puts, half fetches.")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.pairs, arguments.requests), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
