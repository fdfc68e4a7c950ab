"""Several controllers share the storage units: what happens to one of them leaves the blocks of the others alone."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.client.draining import drain_unit, undrain_unit
from transfer_queue.client.moving import move_partition
from transfer_queue.config.processes import Durability
from transfer_queue.control.directory import shard_of
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset, mark_end
from transfer_queue.errors import CapacityError, TransferQueueError
from transfer_queue.storage.conformance.servers import CAPACITY, Servers, wait_until

MIB = 1 << 20
SHARDS = 2
VICTIM = 1
"""The controller that is killed."""
_KEYS = [str(row) for row in range(4)]


@contextmanager
def _queue(like: Servers, directory: Path, durability: Durability) -> Iterator[Servers]:
    """This process attached to a queue of several controllers, on the backend of ``like``."""
    running = Servers(like.kind, like.settings, directory, shards=SHARDS, durability=durability)
    try:
        tq.init({"controller": {"addresses": [running.address]}, "security": {"allowPickle": False}})
        try:
            yield running
        finally:
            tq.close()
    finally:
        running.stop()


def _partition_on(shard: int, what: str = "p") -> str:
    return next(name for name in (f"{what}{number}" for number in range(1000)) if shard_of(name, SHARDS) == shard)


def _put(partition: str, value: int) -> None:
    fields = TensorDict({"x": torch.full((4, MIB), value, dtype=torch.uint8)}, batch_size=[4])
    tq.kv_batch_put(_KEYS, partition, fields)


def _values(partition: str) -> list[int]:
    return [int(row.unique()) for row in tq.kv_batch_get(_KEYS, partition)["x"]]


def _is_back(partition: str) -> bool:
    try:
        return _values(partition) == [VICTIM] * 4
    except (TransferQueueError, ValueError):
        return False


def _takes_rows(partition: str) -> bool:
    try:
        _put(partition, VICTIM)
    except TransferQueueError:
        return False
    return True


@pytest.mark.parametrize("durability", ["process", "none"])
def test_a_killed_controller_costs_its_own_rows_at_most(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "30")
    others = [_partition_on(shard) for shard in range(SHARDS) if shard != VICTIM]
    own, busy = _partition_on(VICTIM), _partition_on(0, "busy")
    with _queue(servers, tmp_path, durability) as queue:
        _put(own, VICTIM)
        for number, partition in enumerate(others):
            _put(partition, 10 + number)
        stop, rounds = threading.Event(), [0]

        def load() -> None:
            while not stop.is_set():
                _put(busy, rounds[0] % 100)
                assert _values(busy) == [rounds[0] % 100] * 4
                tq.kv_clear(_KEYS, busy)
                rounds[0] += 1

        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load)
            try:
                queue.kill_controller(VICTIM)
                before = rounds[0]
                wait_until(lambda: loading.done() or rounds[0] > before + 1, "the others go on without it")
                queue.restart_controller(VICTIM)
                if durability == "none":
                    wait_until(lambda: _takes_rows(own), "it takes rows again")
                wait_until(lambda: _is_back(own), "its rows are there")
            finally:
                stop.set()
            loading.result()
        assert [_values(partition) for partition in others] == [[10 + n] * 4 for n in range(len(others))]
        for partition in (own, *others):
            tq.kv_clear(_KEYS, partition)
        wait_until(lambda: queue.used() < MIB, "no block of any controller or of any life is left")


def test_the_space_of_a_unit_is_shared_by_the_blocks_of_all_controllers(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "1")
    with _queue(servers, tmp_path, "none") as queue:
        partitions = [_partition_on(shard) for shard in range(SHARDS)]
        with pytest.raises(CapacityError):
            _overfill(partitions)
        for partition in partitions:
            tq.kv_clear(list(tq.kv_list(partition)[partition]), partition)
        wait_until(lambda: queue.used() < MIB, "the blocks of all controllers are freed")
        for partition in partitions:
            wait_until(partial(_takes_rows, partition), "there is space again")
            assert _is_back(partition)


def _overfill(partitions: list[str]) -> None:
    fields = TensorDict({"x": torch.zeros(4, MIB, dtype=torch.uint8)}, batch_size=[4])
    for number in range(2 * CAPACITY // (4 * MIB) + 1):
        tq.kv_batch_put([f"{number} {key}" for key in _KEYS], partitions[number % len(partitions)], fields)


def test_what_one_controller_does_with_the_blocks_several_do(servers: Servers, tmp_path: Path) -> None:
    """Drain a unit, move a partition, load a checkpoint, deliver leased rows again, read by processes of a loader."""
    partitions = [_partition_on(shard) for shard in range(SHARDS)]
    with _queue(servers, tmp_path, "process") as queue:
        client = tq.get_client()
        for number, partition in enumerate(partitions):
            _put(partition, number)
        asyncio.run(drain_unit([queue.address], "storage-0"))
        assert [_values(partition) for partition in partitions] == [[number] * 4 for number in range(SHARDS)]
        asyncio.run(undrain_unit([queue.address], "storage-0"))

        moved = asyncio.run(move_partition([queue.address], partitions[0], 1))
        assert (moved.rows, moved.source) == (4, 0)
        assert [_values(partition) for partition in partitions] == [[number] * 4 for number in range(SHARDS)]

        tq.save_checkpoint(tmp_path / "checkpoint", include_storage=True)
        for partition in partitions:
            tq.kv_clear(_KEYS, partition)
        tq.load_checkpoint(tmp_path / "checkpoint")
        views = [tq.kv_batch_get(_KEYS, partition, zero_copy=True)["x"] for partition in partitions]
        assert [int(view[0][0]) for view in views] == list(range(SHARDS))

        for number, partition in enumerate(partitions):
            for lease in (0.1, math.inf):
                meta = client.get_meta(["x"], 4, partition, task_name="train", lease=lease, timeout=60)
                assert {int(row.unique()) for row in client.get_data(meta)["x"]} == {number}
        last = SHARDS - 1  # a worker process reads from another controller than the first
        mark_end(partitions[last])
        dataset = StreamingDataset(None, 2, 2, ["x"], partitions[last], task_name="other", dp_rank=0)
        batches = list(
            StreamingDataLoader(dataset, num_workers=1, collate_fn=_first_values, multiprocessing_context="spawn")
        )
        assert batches == [[last] * 2] * 2

        del views
        for partition in partitions:
            client.clear_partition(partition)
        wait_until(lambda: queue.used() < MIB, "nothing is left")


def _first_values(sample: tuple[TensorDict, tq.BatchMeta]) -> list[int]:
    return [int(row[0]) for row in sample[0]["x"]]
