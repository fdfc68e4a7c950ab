"""Latency of small puts and gets, throughput of large ones, on this machine with local server processes.

``python bench/latency.py [--controller HOST:PORT] [--tcp]``: medians and 99th percentiles in milliseconds, GB/s.
Without an address it starts a controller and two storage units of its own. Plain copies are
measured beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent.parent))

import transfer_queue as tq
from tests.integration.stack import Stack

MB = 1e6


def timings(call: Callable[[int], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of ``count`` calls, milliseconds."""
    for number in range(count // 10 + 1):
        call(-1 - number)
    times = []
    for number in range(count):
        start = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), sorted(times)[int(len(times) * 0.99)]


def small() -> None:
    row = TensorDict({"x": torch.zeros(1, 256)}, batch_size=[1])
    put = timings(lambda number: tq.kv_batch_put([f"k{number}"], "small", row), 2000)
    get = timings(lambda number: tq.kv_batch_get([f"k{max(number, 0)}"], "small"), 2000)
    listing = timings(lambda number: tq.get_client().get_partition_list(), 2000)
    print(f"1 KB put     p50 {put[0]:.3f} ms  p99 {put[1]:.3f} ms")
    print(f"1 KB get     p50 {get[0]:.3f} ms  p99 {get[1]:.3f} ms")
    print(f"round trip   p50 {listing[0]:.3f} ms  p99 {listing[1]:.3f} ms")
    tq.get_client().clear_partition("small")


def large(megabytes: int, rounds: int) -> None:
    rows = 256
    data = TensorDict({"x": torch.randn(rows, megabytes * 1_000_000 // 4 // rows)}, batch_size=[rows])
    nbytes = data["x"].nbytes
    keys = [f"r{row}" for row in range(rows)]
    puts, gets, copies = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        tq.kv_batch_put(keys, "large", data)
        puts.append(nbytes / (time.perf_counter() - start) / 1e9)
        start = time.perf_counter()
        back = tq.kv_batch_get(keys, "large")
        gets.append(nbytes / (time.perf_counter() - start) / 1e9)
        values = back["x"].values()
        start = time.perf_counter()
        values.copy_(data["x"].flatten().view_as(values))
        copies.append(nbytes / (time.perf_counter() - start) / 1e9)
        del back, values
        tq.get_client().clear_partition("large")
    for name, values_ in (("put", puts), ("get copy", gets), ("memcpy warm", copies)):
        print(f"{megabytes} MB {name:12} median {statistics.median(values_):.2f} GB/s  best {max(values_):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--controller", help="host:port of a running queue")
    parser.add_argument("--tcp", action="store_true", help="do not use shared memory")
    parser.add_argument("--megabytes", type=int, default=302)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stack = None
    if not arguments.controller:
        stack = Stack(units=2, capacity="1Gi", settings={"sharedMemory": not arguments.tcp}, prefault=True)
        stack.start()
        for unit in stack.units:
            unit.wait_prefaulted()
    os.environ["TQ_CONTROLLER_ADDRESS"] = arguments.controller or stack.address  # type: ignore[union-attr]
    try:
        tq.init()
        small()
        large(arguments.megabytes, arguments.rounds)
    finally:
        tq.close()
        if stack is not None:
            stack.stop()


if __name__ == "__main__":
    main()
