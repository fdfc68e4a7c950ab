"""GPU tensors through the queue, beside plain copies between pinned memory and the GPU: ``python -m bench.gpu``.

Starts a controller and one storage unit on this machine. Prints one JSON object: the card and, for each size, GB/s of
each copy (median of the rounds), what share of a pinned copy put and get reach, and where the time of a put and of a
get goes. Each round checks the bytes that came back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.io import shared_io
from transfer_queue.columns import device, encoding
from transfer_queue.columns.column import Bytes
from transfer_queue.launch.local import LocalStack, default_plan

ROWS = 256
OFFSET = 64
"""Where data begins in a block: behind its header."""
Times = dict[str, float]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long ``call`` takes, the GPU's work included, and its result."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


@contextlib.contextmanager
def shared_file(nbytes: int) -> Iterator[Bytes]:
    """Bytes of a file in shared memory, mapped and registered with CUDA as an arena is."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(mapped, np.uint8)
        array[:: mmap.PAGESIZE] = 0
        device.pin(array)
        yield array


class Spans:
    """Seconds within a put or get: from its start to when data began to move, moving, and from then to its end."""

    def __init__(self) -> None:
        self._marks: list[float] = []
        copy_into, waited = device.CudaBytes.copy_into, device.complete_on

        def timed_copy(self: Any, target: Bytes) -> None:
            spans.mark()
            copy_into(self, target)
            spans.mark()

        @contextlib.contextmanager
        def timed_wait(streams: Any) -> Iterator[None]:
            spans.mark()
            with waited(streams):
                yield
            spans.mark()

        spans = self
        device.CudaBytes.copy_into = timed_copy  # type: ignore[method-assign]
        device.complete_on = timed_wait

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def of(self, call: Callable[[], Any]) -> tuple[Times, Any]:
        torch.cuda.synchronize()
        self._marks.clear()
        start = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        end = time.perf_counter()
        first, last = (self._marks[0], self._marks[-1]) if self._marks else (end, end)
        return {"total": end - start, "before": first - start, "copy": last - first, "after": end - last}, result


def plain_copies(data: torch.Tensor, pinned: torch.Tensor, landing: torch.Tensor, shared: Bytes) -> Times:
    """Seconds of copies without the queue: of pinned memory, and of shared memory at the start of a page and not."""
    times = {}
    flat, target = data.view(-1).view(torch.uint8), landing.view(-1).view(torch.uint8)
    times["pinned_from_gpu"], _ = seconds(lambda: pinned.copy_(data, non_blocking=True))
    times["pinned_to_gpu"], _ = seconds(lambda: landing.copy_(pinned, non_blocking=True))
    for name, offset in (("shared", 0), ("shared_unaligned", OFFSET)):
        host = torch.from_numpy(shared[offset : offset + data.nbytes])
        times[f"{name}_from_gpu"], _ = seconds(partial(host.copy_, flat, non_blocking=True))
        times[f"{name}_to_gpu"], _ = seconds(partial(target.copy_, host, non_blocking=True))
    return times


def one_round(
    number: int, data: torch.Tensor, pinned: torch.Tensor, landing: torch.Tensor, shared: Bytes, spans: Spans
) -> Times:
    """Seconds of each way of copying, and of the parts of put and get."""
    data.copy_(torch.rand_like(data))
    keys = [f"{number}/{row}" for row in range(ROWS)]
    times = plain_copies(data, pinned, landing, shared)
    batch = TensorDict({"x": data}, batch_size=[ROWS])

    def note(name: str, call: Callable[[], Any]) -> Any:
        parts, result = spans.of(call)
        times[name] = parts.pop("total")
        times.update({f"{name}.{part}": value for part, value in parts.items()})
        return result

    note("put", lambda: tq.kv_batch_put(keys, "gpu", batch))
    landing.zero_()
    note("get_out", lambda: tq.kv_batch_get(keys, "gpu", out={"x": landing}))
    check(torch.equal(landing, data), "get into a GPU tensor")
    back = note("get", lambda: tq.kv_batch_get(keys, "gpu", device="cuda"))
    check(torch.equal(back["x"].values().view_as(data), data), "get to the GPU")
    del back
    times["get_host"], back = seconds(lambda: tq.kv_batch_get(keys, "gpu"))
    check(torch.equal(back["x"].values().view(data.shape), data.cpu()), "get to the host")
    tq.get_client().clear_partition("gpu")
    return times


def overhead(repeat: int = 50) -> dict[str, float]:
    """Milliseconds of what a put and a get do beside moving the bytes, medians."""
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        found[name] = statistics.median(seconds(call)[0] for _ in range(repeat)) * 1e3

    async def nothing() -> None: ...

    async def copy_thread() -> None:
        await shared_io().run_copy(lambda: None)

    client = tq.get_client()
    keys = [f"k{row}" for row in range(ROWS)]
    tiny = TensorDict({"x": torch.zeros(ROWS, 1, device="cuda")}, batch_size=[ROWS])
    megabyte = TensorDict({"x": torch.zeros(ROWS, 1024, device="cuda")}, batch_size=[ROWS])
    note("synchronize", bool)
    note("to the I/O thread and back", lambda: shared_io().wait(nothing()))
    note("to the copy thread and back", lambda: shared_io().wait(copy_thread()))
    note("request to the controller", lambda: client.get_partition_list())
    note("encode 256 rows", lambda: encoding.encode(megabyte, rows=ROWS))
    for name, batch in (("1 KB", tiny), ("1 MB", megabyte)):
        note(f"put {name} under {ROWS} keys", partial(tq.kv_batch_put, keys, "small", batch))
        note(f"get {name} of {ROWS} keys", lambda: tq.kv_batch_get(keys, "small", device="cuda"))
    client.clear_partition("small")
    return found


def check(same: bool, what: str) -> None:
    if not same:
        raise SystemExit(f"{what}: the bytes that came back differ")


def respects_streams(nbytes: int) -> None:
    """Put what another stream is still computing, and get it on that stream: the values are those of its end."""
    side: Any = torch.cuda.Stream()
    value = torch.zeros(ROWS, nbytes // 4 // ROWS, device="cuda")
    landing = torch.zeros_like(value)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(200):
            value.add_(1)
        keys = [str(row) for row in range(ROWS)]
        tq.kv_batch_put(keys, "stream", TensorDict({"x": value}, batch_size=[ROWS]))
        back = tq.kv_batch_get(keys, "stream", device="cuda")["x"].values()
        check(bool((back == 200).all()), "put from a busy stream")
        for _ in range(200):
            landing.add_(1)
        tq.kv_batch_get(keys, "stream", out={"x": landing})
        check(bool((landing == 200).all()), "get into a tensor that a stream was writing")
    tq.get_client().clear_partition("stream")


def survives_recycling(nbytes: int, rounds: int = 8) -> None:
    """Memory that was read into a GPU tensor is free at once: a put that takes it changes nothing that was got."""
    keys = [str(row) for row in range(ROWS)]
    landing = torch.empty(ROWS, nbytes // 4 // ROWS, device="cuda")
    for number in range(rounds):
        value = torch.full_like(landing, number)
        tq.kv_batch_put(keys, "again", TensorDict({"x": value}, batch_size=[ROWS]))
        tq.kv_batch_get(keys, "again", out={"x": landing})
        tq.kv_batch_put(keys, "again", TensorDict({"x": value + 1}, batch_size=[ROWS]))
        check(bool((landing == number).all()), "a get whose memory was put to again")
    tq.get_client().clear_partition("again")


def one_size(megabytes: int, rounds: int, spans: Spans) -> dict[str, Any]:
    nbytes = megabytes << 20
    data = torch.empty(ROWS, nbytes // 4 // ROWS, device="cuda")
    pinned = torch.empty(data.shape, pin_memory=True)
    landing = torch.empty_like(data)
    respects_streams(nbytes)
    survives_recycling(nbytes)
    with shared_file(nbytes + mmap.PAGESIZE) as shared:
        found = [one_round(number, data, pinned, landing, shared, spans) for number in range(rounds + 2)][2:]
    middle = {name: statistics.median(times[name] for times in found) for name in found[0]}
    speed = {name: nbytes / value / 1e9 for name, value in middle.items() if "." not in name}
    parts = {name: value * 1e3 for name, value in middle.items() if "." in name}
    share = {
        "put": speed["put"] / speed["pinned_from_gpu"],
        "get": speed["get"] / speed["pinned_to_gpu"],
        "get_out": speed["get_out"] / speed["pinned_to_gpu"],
    }
    return {"GB_per_s": speed, "share_of_pinned_copy": share, "milliseconds": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here: run this on a machine with a GPU and a CUDA build of torch")
    spans = Spans()
    # A put of more than half of a unit goes in parts, which would be another measurement.
    stack = LocalStack(default_plan(units=1, unit_capacity=4 * max(arguments.megabytes) << 20)).start()
    try:
        tq.init({"controller": {"addresses": [stack.controller_address]}})
        sizes = {f"{size} MB": one_size(size, arguments.rounds, spans) for size in arguments.megabytes}
        result = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "sizes": sizes,
            "overhead_ms": overhead(),
        }
    finally:
        tq.close()
        stack.stop()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
