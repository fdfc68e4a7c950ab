"""The transfers of one PPO step, without the computing: 8 workers, 1024 rows of 1k prompt and 4k response tokens.

Rollout workers put prompts and responses; then every stage fetches its fields and puts its results, 128 rows a worker.
Through a Ray driver instead, each stage's workers return their results to the driver, which joins, splits and passes
them on as arguments, as a single controller without a queue does: as TensorDicts, or in the form that verl's DataProto
takes between processes (consolidated, then torch.save into bytes).
"""

from __future__ import annotations

import io
import itertools
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from bench.peers.base import Peer
from bench.protocol import PeerProcess
from bench.workloads import Against, Row, Workload

WORKERS = {"full": 8, "smoke": 2}
ROWS = {"full": 1024, "smoke": 64}
PROMPT, RESPONSE = 1024, 4096


@dataclass(frozen=True)
class Stage:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


INPUTS = ("prompts", "responses", "attention_mask", "position_ids")
STAGES = (
    Stage("rollout", (), INPUTS),
    Stage("reward", ("prompts", "responses"), ("rewards",)),
    Stage("old_log_prob", INPUTS, ("old_log_prob",)),
    Stage("adv", ("rewards", "old_log_prob"), ("advantages", "returns")),
    Stage("update_actor", (*INPUTS, "rewards", "old_log_prob", "advantages", "returns"), ()),
)
_COPIES = (
    "One thread that only copies the bytes takes {ppo/memcpy/update_actor} for update_actor, {ppo/memcpy/total} in all."
)
WORKLOAD = Workload(
    "One PPO step, 8 workers, 1024 rows",
    ("ours", "upstream", "ray_driver", "dataproto_driver", "memcpy"),
    (
        *(Row(stage.name, f"PPO step: {stage.name}", "s", "lower") for stage in STAGES[:-1]),
        Row("update_actor", "PPO step: update_actor", "s", "lower", 0.12, limit=_COPIES),
        Row("total", "PPO step: total", "s", "lower", 0.65, limit=_COPIES),
    ),
    repetitions=3,
    interleaved=False,
    against=(
        Against("update_actor", "update_actor: against a Ray driver", "ours", "dataproto_driver", 15.0, _COPIES),
        Against("update_actor", "update_actor: against the release", "ours", "upstream", 4.0, _COPIES),
        Against("total", "whole step: against the release", "ours", "upstream", 3.0, _COPIES),
    ),
)
_steps = itertools.count()


def columns(names: tuple[str, ...], rows: int) -> TensorDict:
    """Fields of ``rows`` rows: int64 tokens, masks and positions, float32 values of responses."""
    made: dict[str, torch.Tensor] = {}
    for name in names:
        if name == "prompts":
            made[name] = torch.randint(0, 150_000, (rows, PROMPT))
        elif name == "responses":
            made[name] = torch.randint(0, 150_000, (rows, RESPONSE))
        elif name in INPUTS:
            made[name] = torch.ones(rows, PROMPT + RESPONSE, dtype=torch.int64)
        else:
            made[name] = torch.rand(rows, RESPONSE)
    return TensorDict(made, batch_size=[rows])


# ------------------------------------------------------------------------------------------------------- with a queue

_outputs: dict[str, TensorDict] = {}
_workers: list[PeerProcess] = []


def prepare(peer: Any, options: dict[str, Any]) -> None:
    """In a worker: make the results of every stage beforehand; they stand for the computing."""
    torch.set_num_threads(1)
    for stage in STAGES:
        _outputs[stage.name] = columns(stage.writes, options["rows"])


def stage(peer: Any, options: dict[str, Any]) -> int:
    """In a worker: one stage of ``rows`` rows. Returns the bytes it fetched."""
    of = next(stage for stage in STAGES if stage.name == options["stage"])
    rows, partition, client = options["rows"], options["partition"], peer.client
    if not of.reads:
        client.put(_outputs[of.name], partition_id=partition)
        return 0
    metadata = client.get_meta(list(of.reads), rows, partition, mode="fetch", task_name=of.name)
    data = client.get_data(metadata)
    if of.writes:
        client.put(_outputs[of.name], metadata=metadata)
    return sum(value.nbytes if not value.is_nested else value.values().nbytes for value in data.values())


def queue_step(peer: Any, rows: int, workers: int) -> dict[str, float]:
    share = {"rows": rows // workers}
    if not _workers:
        for _ in range(workers):
            _workers.append(PeerProcess(peer.name, sys.executable, attach=peer.attached))
        for worker in _workers:
            worker.send("ppo.prepare", **share)
        for worker in _workers:
            worker.receive()
    partition = f"step-{next(_steps)}"
    result = {}
    begin = time.perf_counter()
    for of in STAGES:
        start = time.perf_counter()
        for worker in _workers:
            worker.send("ppo.stage", stage=of.name, partition=partition, **share)
        fetched = sum(worker.receive() for worker in _workers)
        result[of.name] = time.perf_counter() - start
        expected = columns(of.reads, 1)
        if fetched != sum(expected[field].nbytes for field in of.reads) * rows:
            raise RuntimeError(f"{of.name} fetched {fetched} bytes")
    result["total"] = time.perf_counter() - begin
    peer.client.clear_partition(partition)
    return result


def stop_workers() -> None:
    for worker in _workers:
        worker.finish()
    while _workers:
        _workers.pop().stop()


# -------------------------------------------------------------------------------------------------- through the driver

_actors: list[Any] = []


class Message:
    """A batch that travels as verl's DataProto does: consolidated, and saved by torch into bytes."""

    def __init__(self, batch: TensorDict) -> None:
        self.batch = batch

    def __reduce__(self) -> Any:
        into = io.BytesIO()
        torch.save(self.batch.contiguous().consolidate(), into)
        return _unpack, (into.getvalue(),)


def _unpack(data: bytes) -> Message:
    return Message(torch.load(io.BytesIO(data), weights_only=False))


class RayWorker:
    """An actor: gets its fields as an argument and returns what it computed."""

    def __init__(self, rows: int, form: Any) -> None:
        torch.set_num_threads(1)
        self._outputs = {stage.name: form(columns(stage.writes, rows)) for stage in STAGES}

    def run(self, name: str, data: Any) -> Any:
        return self._outputs[name]


def _plain(batch: TensorDict) -> TensorDict:
    return batch


def _driver_step(rows: int, workers: int, form: Any) -> dict[str, float]:
    import ray

    if not _actors:
        kind = ray.remote(num_cpus=1)(RayWorker)
        _actors.extend(kind.remote(rows // workers, form) for _ in range(workers))
        ray.get([actor.run.remote("update_actor", None) for actor in _actors])
    held = TensorDict({}, batch_size=[rows])
    result = {}
    begin = time.perf_counter()
    for of in STAGES:
        start = time.perf_counter()
        parts: list[Any] = list(held.select(*of.reads).chunk(workers)) if of.reads else [None] * workers
        # A chunk is a view: the clone keeps Ray from sending the whole storage of each field to every worker.
        sent = [None if part is None else form(part.clone()) for part in parts]
        answers = [actor.run.remote(of.name, part) for actor, part in zip(_actors, sent, strict=True)]
        done = ray.get(answers)
        if of.writes:
            held.update(TensorDict.cat([getattr(part, "batch", part) for part in done], 0))
        result[of.name] = time.perf_counter() - start
    result["total"] = time.perf_counter() - begin
    return result


# ----------------------------------------------------------------------------------------------------------- the limit

_held: dict[str, TensorDict] = {}


def _copy_step(rows: int) -> dict[str, float]:
    """Every fetch one copy into warm memory, every put another."""
    if not _held:
        everything = columns(tuple(dict.fromkeys(name for of in STAGES for name in of.writes)), rows)
        _held.update(source=everything, target=everything.clone())
    result = {}
    for of in STAGES:
        start = time.perf_counter()
        for name in (*of.reads, *of.writes):
            _held["target"][name].copy_(_held["source"][name])
        result[of.name] = time.perf_counter() - start
    return result | {"total": sum(result.values())}


def measure(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    rows, workers = ROWS[options["scale"]], WORKERS[options["scale"]]
    if options["peer"] == "ray_driver":
        return _driver_step(rows, workers, _plain)
    if options["peer"] == "dataproto_driver":
        return _driver_step(rows, workers, Message)
    if options["peer"] == "memcpy":
        return _copy_step(rows)
    return queue_step(peer, rows, workers)
