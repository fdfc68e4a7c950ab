"""One training step of 64 nodes, 1024 GPUs and 8192 clients through the real control core: ``python -m bench.scale``.

The clients are virtual: no sockets and no bytes of data. Commands and replies are encoded and decoded as on the wire:
the time is what a controller spends beside its sockets, in seconds of processor time. 8192 rollout workers put rows one
by one, as sequences end; 1024 trainers, whose fetches are parked from the start, take batches through reward,
old_log_prob, adv and update, and put the fields of each. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from typing import Any

import msgspec

from bench.control_core import resident
from transfer_queue.control import ControlCore
from transfer_queue.control.commands import Batch, BlockRef, Clear, Command, Commit, Fetch
from transfer_queue.control.effects import Answer, Parked
from transfer_queue.control.schema import FieldSchema
from transfer_queue.wire.messages import ENCODER, ControllerRequest

STAGES: list[tuple[str, list[str], list[str]]] = [
    ("reward", ["prompt", "response"], ["reward"]),
    ("old_log_prob", ["prompt", "response"], ["old_log_prob"]),
    ("adv", ["reward", "old_log_prob"], ["adv", "returns"]),
    ("update", ["prompt", "response", "old_log_prob", "adv", "returns"], []),
]
"""Task, fields it reads, fields it writes."""
ROLLOUT = ["prompt", "response", "mask"]
TIMEOUT_S = 3600.0

_decode = msgspec.msgpack.Decoder(ControllerRequest).decode


def schema(names: list[str]) -> list[FieldSchema]:
    return [FieldSchema(name, "ragged", "int64", (None,)) for name in names]


class Step:
    """One step: who sends what next, and the core that answers."""

    def __init__(self, rows: int, clients: int, trainers: int, batch: int, units: int) -> None:
        self.core = ControlCore()
        self.rows, self.clients, self.trainers, self.batch, self.units = rows, clients, trainers, batch, units
        self.times: list[float] = []
        self.wire_bytes = 0
        self.consumed = {task: 0 for task, _, _ in STAGES}
        self.most_parked = 0
        self._request = 0
        self._block = 0
        self._fetching: dict[tuple[int, int], int] = {}  # (client, request) -> stage
        self._due: deque[tuple[int, Command, int | None]] = deque()

    def run(self) -> None:
        for trainer in range(self.trainers):
            for stage in range(len(STAGES)):
                self._fetch(trainer, stage)
        self._work()
        self.most_parked = len(self._fetching)
        for number in range(self.rows):
            client = number % self.clients
            self._send(client, self._commit(ROLLOUT, 1, client, keys=[f"{client}/{number // self.clients}"]), None)
            self._work()

    def clear(self) -> float:
        """Seconds of clearing the partition, which frees every block."""
        self._send(0, Clear("step"), None)
        return self.times.pop()

    def _work(self) -> None:
        while self._due:
            self._send(*self._due.popleft())

    def _fetch(self, trainer: int, stage: int) -> None:
        task, fields, _ = STAGES[stage]
        self._due.append((self.clients + trainer, Fetch("step", fields, self.batch, task, TIMEOUT_S), stage))

    def _commit(self, names: list[str], rows: int, client: int, **named: Any) -> Commit:
        self._block += 1
        block = BlockRef(client % self.units, self._block, 0, rows, rows * (1 << 20) * len(names))
        lengths = {name: rows * (4096).to_bytes(4, "little") for name in names}
        return Commit("step", fields=schema(names), blocks=[block], lengths=lengths, **named)

    def _send(self, client: int, command: Command, stage: int | None) -> None:
        """What the controller does with a command; what its answers make clients send next is due later."""
        self._request += 1
        request = self._request
        if stage is not None:
            self._fetching[client, request] = stage
        wire = ENCODER.encode(command)
        start = time.thread_time()
        result = self.core.apply(_decode(wire), 0.0, client=client, request=request)
        effects = self.core.drain_effects()
        replies = [(effect.client, effect.request, effect.reply) for effect in effects if isinstance(effect, Answer)]
        if not isinstance(result, Parked):
            replies.append((client, request, result))
        encoded = [ENCODER.encode(reply) for _, _, reply in replies]
        self.times.append(time.thread_time() - start)
        self.wire_bytes += len(wire) + sum(map(len, encoded))
        for owner, number, reply in replies:
            fetched = self._fetching.pop((owner, number), None)
            if fetched is not None and isinstance(reply, Batch):
                self._fetched(owner - self.clients, fetched, reply)

    def _fetched(self, trainer: int, stage: int, found: Batch) -> None:
        task, _, writes = STAGES[stage]
        self.consumed[task] += len(found.indexes) // 8
        client = self.clients + trainer
        if writes:
            self._due.append((client, self._commit(writes, self.batch, client, indexes=found.indexes), None))
        self._fetch(trainer, stage)


def measure(rows: int, clients: int, trainers: int, batch: int, units: int) -> dict[str, Any]:
    gc.collect()
    before = resident()
    step = Step(rows, clients, trainers, batch, units)
    step.run()
    if any(count != rows for count in step.consumed.values()):
        raise SystemExit(f"{rows} rows were put, and consumed were {step.consumed}")
    count, busy = len(step.times), sum(step.times)
    gc.collect()
    kept = resident() - before - 8 * count  # the times measured are not the core's
    ordered = sorted(step.times)
    return {
        "rows": rows,
        "clients": clients + trainers,
        "commands": count,
        "parked_at_most": step.most_parked,
        "commands_per_s": round(count / busy),
        "busy_s": round(busy, 2),
        "latency_us": {name: round(ordered[int(count * at)] * 1e6) for name, at in (("p50", 0.5), ("p99", 0.99))},
        "longest_ms": round(ordered[-1] * 1e3, 1),
        "wire_megabytes": round(step.wire_bytes / 1e6, 1),
        "core_bytes_per_row": round(kept / rows),
        "clear_s": round(step.clear(), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=262_144, help="of a step; a multiple of the batch")
    parser.add_argument("--clients", type=int, default=8192, help="that put rows one by one")
    parser.add_argument("--trainers", type=int, default=1024, help="that take and put batches")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--units", type=int, default=512)
    options = parser.parse_args()
    print(json.dumps(measure(**vars(options)), indent=1))


if __name__ == "__main__":
    main()
