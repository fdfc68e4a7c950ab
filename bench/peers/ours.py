"""This checkout's TransferQueue: memory storage, two units of 1 GiB on this machine, default settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import transfer_queue as tq
from bench.peers.queue import Queue
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.launch.plan import LocalPlan

UNITS = 2


class Ours(Queue):
    def __init__(self) -> None:
        super().__init__()
        self._stack: LocalStack | None = None

    def start(self, attach: dict[str, Any] | None) -> None:
        torch.set_num_threads(1)
        if attach is None:
            self._stack = LocalStack(self.plan()).start()
            self.settle(self._stack)
            attach = self.attach(self._stack)
        self.attached = attach
        tq.init(attach)

    def plan(self) -> LocalPlan:
        return default_plan(units=UNITS)

    def attach(self, stack: LocalStack) -> dict[str, Any]:
        """What ``init`` is told."""
        return {"controller": {"addresses": [stack.controller_address]}}

    def settle(self, stack: LocalStack) -> None:
        """Arenas fault their pages in after the start, in the background; a queue in use is past that."""
        deadline = time.monotonic() + 120
        while True:
            found = (Path("/dev/shm").glob(f"tq-{unit.name}-{unit.pid}-*") for unit in stack.processes)
            arenas = [path.stat() for paths in found for path in paths]
            if len(arenas) >= UNITS and all(arena.st_blocks * 512 >= arena.st_size for arena in arenas):
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the arenas of the storage units are not prefaulted after 120 s")
            time.sleep(0.1)

    def stop(self) -> None:
        tq.close()
        if self._stack is not None:
            self._stack.stop()


PEER = Ours
