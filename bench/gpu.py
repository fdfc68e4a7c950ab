"""GPU tensors through the queue, beside plain copies between pinned memory and the GPU: ``python -m bench.gpu``.

Starts a controller and one storage unit on this machine. Prints one JSON object: the card, GB/s of each copy (median
of the rounds), and what share of a pinned copy put and get reach. Each round checks the bytes that came back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.launch.local import LocalStack, default_plan

ROWS = 256


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long ``call`` takes, the GPU's work included, and its result."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def one_round(number: int, data: torch.Tensor, pinned: torch.Tensor, landing: torch.Tensor) -> dict[str, float]:
    """Seconds of each way of copying."""
    data.copy_(torch.rand_like(data))
    keys = [f"{number}/{row}" for row in range(ROWS)]
    times = {}
    times["pinned_from_gpu"], _ = seconds(lambda: pinned.copy_(data, non_blocking=True))
    times["pinned_to_gpu"], _ = seconds(lambda: landing.copy_(pinned, non_blocking=True))
    batch = TensorDict({"x": data}, batch_size=[ROWS])
    times["put"], _ = seconds(lambda: tq.kv_batch_put(keys, "gpu", batch))
    landing.zero_()
    times["get_out"], _ = seconds(lambda: tq.kv_batch_get(keys, "gpu", out={"x": landing}))
    check(torch.equal(landing, data), "get into a GPU tensor")
    times["get"], back = seconds(lambda: tq.kv_batch_get(keys, "gpu", device="cuda"))
    check(torch.equal(back["x"].values().view_as(data), data), "get to the GPU")
    times["get_host"], back = seconds(lambda: tq.kv_batch_get(keys, "gpu"))
    check(torch.equal(back["x"].values().view(data.shape), data.cpu()), "get to the host")
    tq.get_client().clear_partition("gpu")
    return times


def check(same: bool, what: str) -> None:
    if not same:
        raise SystemExit(f"{what}: the bytes that came back differ")


def respects_streams(nbytes: int) -> None:
    """Put what another stream is still computing, and get it on that stream: the values are those of its end."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    value = torch.zeros(ROWS, nbytes // 4 // ROWS, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(200):
            value.add_(1)
        tq.kv_batch_put([str(row) for row in range(ROWS)], "stream", TensorDict({"x": value}, batch_size=[ROWS]))
        back = tq.kv_batch_get([str(row) for row in range(ROWS)], "stream", device="cuda")["x"].values()
        check(bool((back == 200).all()), "put from a busy stream")
    tq.get_client().clear_partition("stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here: run this on a machine with a GPU and a CUDA build of torch")
    nbytes = arguments.megabytes << 20
    data = torch.empty(ROWS, nbytes // 4 // ROWS, device="cuda")
    pinned = torch.empty(data.shape, pin_memory=True)
    landing = torch.empty_like(data)
    stack = LocalStack(default_plan(units=1)).start()
    try:
        tq.init({"controller": {"addresses": [stack.controller_address]}})
        respects_streams(nbytes)
        rounds = [one_round(number, data, pinned, landing) for number in range(arguments.rounds + 2)][2:]
    finally:
        tq.close()
        stack.stop()
    speed = {name: statistics.median(data.nbytes / times[name] / 1e9 for times in rounds) for name in rounds[0]}
    share = {
        "put": speed["put"] / speed["pinned_from_gpu"],
        "get": speed["get"] / speed["pinned_to_gpu"],
        "get_out": speed["get_out"] / speed["pinned_to_gpu"],
    }
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "megabytes": arguments.megabytes}
    print(json.dumps({**facts, "GB_per_s": speed, "share_of_pinned_copy": share}, indent=1))


if __name__ == "__main__":
    main()
