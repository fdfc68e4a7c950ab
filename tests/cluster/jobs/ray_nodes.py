"""Ray job of the end-to-end test: an actor on each node of a RayCluster; each puts rows and gets those of all.

The last line that it prints is JSON: for each Ray node its host, whether its raylet was started with the queue's
settings, and whether its actor read all rows as they were put.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import transfer_queue as tq

ROWS = 16


class Worker:
    """Uses the queue that its pod was given."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        tq.init()

    def put(self, first: int) -> dict[str, str]:
        """Digests of the rows that were put, by key."""
        generator = torch.Generator().manual_seed(first)
        put = {}
        for number in range(first, first + ROWS):
            tokens, text = torch.randint(0, 50_000, (1024,), generator=generator), f"row {number}"
            tq.kv_put(f"{number:04d}", "ray", {"tokens": tokens, "text": text})
            put[f"{number:04d}"] = digest(tokens, text)
        return put

    def get(self, keys: list[str]) -> dict[str, Any]:
        found = tq.kv_batch_get(keys, "ray", ["tokens", "text"])
        digests = map(digest, found["tokens"], found["text"])
        return {
            "host": socket.gethostname(),
            "injected": "TQ_CONFIG_FILE" in raylet(),
            "rows": dict(zip(keys, digests, strict=True)),
        }

    def close(self) -> None:
        tq.close()


def digest(tokens: torch.Tensor, text: str) -> str:
    return hashlib.sha256(tokens.numpy().tobytes() + str(text).encode()).hexdigest()


def raylet() -> dict[str, str]:
    """The environment that this node's raylet was started with."""
    for folder in Path("/proc").glob("[0-9]*"):
        if (folder / "comm").read_text().strip() == "raylet":
            entries = (folder / "environ").read_bytes().decode().split("\0")
            return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    sys.exit("no raylet runs here")


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    workers = [
        ray.remote(Worker)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
        for node in nodes
    ]
    put: dict[str, str] = {}
    for rows in ray.get([worker.put.remote(number * ROWS) for number, worker in enumerate(workers)]):
        put |= rows
    found = ray.get([worker.get.remote(list(put)) for worker in workers])
    ray.get([worker.close.remote() for worker in workers])
    print(json.dumps([{**each, "rows": len(put), "same": each["rows"] == put} for each in found]), flush=True)


if __name__ == "__main__":
    main()
