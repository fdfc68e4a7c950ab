"""CPU tensors from one Ray actor to another, by each transport that works here: ``python -m bench.rdt``.

The writer has 302 MB in 9 tensors. A method of it returns them, and the reader takes them as an argument: the time
goes from the call of the writer to the end of the reader's method, in which all tensors are there. Prints a table of
medians, best and worst, and why other transports do not run.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from typing import Any

import ray
import torch
from ray.experimental.collective import create_collective_group

from transfer_queue.ray import TRANSPORT

SHAPES = [(4096, 1024), (2048, 2048), (4096, 2048), *[(4096, 2390)] * 6]
"""float32."""


class _Actor:
    def make(self) -> None:
        self._tensors = [torch.rand(shape) for shape in SHAPES]

    def plain(self) -> list[torch.Tensor]:
        return self._tensors

    @ray.method(tensor_transport=TRANSPORT)  # type: ignore[untyped-decorator]
    def transferqueue(self) -> list[torch.Tensor]:
        return self._tensors

    @ray.method(tensor_transport="gloo")  # type: ignore[untyped-decorator]
    def gloo(self) -> list[torch.Tensor]:
        return self._tensors

    @ray.method(tensor_transport="nixl")  # type: ignore[untyped-decorator]
    def nixl(self) -> list[torch.Tensor]:
        return self._tensors

    def take(self, tensors: list[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)


Actor: Any = ray.remote(num_cpus=0)(_Actor)


def refusal(transport: str) -> str:
    """Why a transport does not run here; empty if it does."""
    if transport != "nixl":
        return ""
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        return f"nixl does not load: {error}"
    return ""


def measure(transport: str, rounds: int) -> list[float]:
    """GB/s of each round but the first two."""
    writer, reader = Actor.remote(), Actor.remote()
    ray.get(writer.make.remote())
    if transport == "gloo":
        create_collective_group([writer, reader], backend="torch_gloo")
    found = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        nbytes = ray.get(reader.take.remote(getattr(writer, transport).remote()))
        found.append(nbytes / (time.perf_counter() - start) / 1e9)
    ray.kill(writer)
    ray.kill(reader)
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
    names = {"transferqueue": TRANSPORT, "plain": "object store", "gloo": "GLOO", "nixl": "NIXL"}
    for method, name in names.items():
        if reason := refusal(method):
            print(f"{name:14} {reason}")
            continue
        found = measure(method, arguments.rounds)
        print(f"{name:14} {statistics.median(found):5.2f} GB/s ({min(found):.2f} to {max(found):.2f})", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
