"""The PyPI release of TransferQueue: SimpleStorage, two units, default settings."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import ray
import torch

import transfer_queue as tq
from bench.peers.queue import Queue


class Upstream(Queue):
    def start(self, attach: dict[str, Any] | None) -> None:
        torch.set_num_threads(1)
        if not version("TransferQueue").startswith("0.1."):
            raise RuntimeError(f"the environment of the peers has TransferQueue {version('TransferQueue')}, not 0.1")
        options: dict[str, Any] = {"log_to_driver": False}
        if attach is None:
            options |= {"num_cpus": 16, "include_dashboard": False, "object_store_memory": 2**28}
        else:
            options |= {"address": attach["ray"]}
        context: Any = ray.init(**options)
        self.attached = attach or {"ray": context.address_info["address"]}
        self.join(attach)

    def join(self, attach: dict[str, Any] | None) -> None:
        tq.init()

    def stop(self) -> None:
        ray.shutdown()


PEER = Upstream
