from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.waiting import wait_until
from transfer_queue.config.processes import BackendChoice, StorageUnitConfig
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import CapacityError, StartError
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.storage.conformance.servers import Servers

MIB = 1 << 20
CAPACITY = 16 * MIB
ROWS = 8
ROW_BYTES = MIB // 4
BATCHES = 2 * 2 * CAPACITY // (ROWS * ROW_BYTES)
"""As many batches of 2 MiB as make twice the memory of both units."""

StartQueue = Callable[..., Servers]


@pytest.fixture
def start_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartQueue]:
    started: list[Servers] = []
    monkeypatch.setenv("TQ_PUT_WAIT", "0")

    def start(shards: int = 1, **changes: Any) -> Servers:
        offload = {"enabled": True, "path": str(tmp_path / "spill"), **changes.pop("offload", {})}
        servers = Servers("simple", {"ssdOffload": offload, **changes}, tmp_path, CAPACITY, shards=shards)
        started.append(servers)
        tq.init({"controller": {"addresses": [servers.address]}})
        return servers

    yield start
    tq.close()
    for servers in started:
        servers.stop()


def batch(number: int) -> TensorDict:
    generator = torch.Generator().manual_seed(number)
    large = torch.randint(0, 255, (ROWS, ROW_BYTES), dtype=torch.uint8, generator=generator)
    return TensorDict({"large": large, "small": torch.arange(ROWS) + number}, batch_size=[ROWS])


def keys(number: int) -> list[str]:
    return [f"{number}-{row}" for row in range(ROWS)]


def spilled(servers: Servers) -> int:
    """Bytes on disk of the files without a name that the units hold open."""
    total = 0
    for unit in servers._units:
        folder = Path(f"/proc/{unit.pid}/fd")
        for descriptor in folder.iterdir():
            if "/spill/" in os.readlink(descriptor):
                total += descriptor.stat().st_blocks * 512
    return total


def read_and_compare(number: int, partition: str) -> None:
    found = tq.kv_batch_get(keys(number), partition)
    expected = batch(number)
    assert torch.equal(torch.stack(list(found["large"].unbind())), expected["large"])
    assert torch.equal(found["small"], expected["small"])


@pytest.mark.parametrize(
    ("shards", "changes"),
    [(1, {}), (1, {"sharedMemory": False}), (2, {})],
    ids=["shared-memory", "tcp", "several-controllers"],
)
def test_twice_the_memory_comes_back_equal_and_the_disk_is_given_back(
    start_queue: StartQueue, tmp_path: Path, shards: int, changes: dict[str, Any]
) -> None:
    servers = start_queue(shards, **changes)
    partitions = [
        next(name for name in iter(lambda: uuid.uuid4().hex, "") if shard_of(name, shards) == shard)
        for shard in range(shards)
    ]

    def of(number: int) -> str:
        return partitions[number % shards]

    for number in range(BATCHES):
        tq.kv_batch_put(keys(number), of(number), batch(number))
    assert spilled(servers) >= CAPACITY
    assert list((tmp_path / "spill").iterdir()) == []
    for number in range(BATCHES):
        read_and_compare(number, of(number))
    first, last = (BATCHES - 1) % shards, BATCHES - 1
    found = tq.kv_batch_get([keys(last)[5], keys(first)[2]], of(last), select_fields=["small"])
    assert found["small"].tolist() == [last + 5, first + 2]
    for number in range(BATCHES):
        tq.kv_clear(keys(number), of(number))
    wait_until(lambda: spilled(servers) == 0, "the disk is given back", 60)
    tq.kv_batch_put(keys(0), of(0), batch(0))
    read_and_compare(0, of(0))


def test_full_disk_is_a_capacity_error_that_names_the_folder_and_nothing_is_lost(
    start_queue: StartQueue, tmp_path: Path
) -> None:
    servers, partition = start_queue(), uuid.uuid4().hex
    for unit in servers._units:  # writes beyond it fail, as on a full disk
        resource.prlimit(unit.pid, resource.RLIMIT_FSIZE, (6 * MIB, 6 * MIB))
    stored = next(number for number in range(BATCHES) if not _fits(number, partition))
    with pytest.raises(CapacityError, match=rf"capacity.*ssdOffload.path {tmp_path}/spill takes no more"):
        tq.kv_batch_put(keys(stored), partition, batch(stored))
    assert stored * ROWS * ROW_BYTES > 2 * CAPACITY
    for number in range(stored):
        read_and_compare(number, partition)
    tq.kv_clear(keys(0) + keys(1), partition)
    wait_until(lambda: _fits(1000, partition), "there is room again", 60)
    read_and_compare(stored - 1, partition)


def _fits(number: int, partition: str) -> bool:
    try:
        tq.kv_batch_put(keys(number), partition, batch(number))
    except CapacityError:
        return False
    return True


def test_capacity_of_the_disk_is_kept_and_named_when_it_is_used_up(start_queue: StartQueue, tmp_path: Path) -> None:
    servers, partition = start_queue(offload={"capacity": "6Mi"}), uuid.uuid4().hex
    stored = next(number for number in range(BATCHES) if not _fits(number, partition))
    with pytest.raises(CapacityError, match=rf"ssdOffload.capacity of {tmp_path}/spill is used up; raise it"):
        tq.kv_batch_put(keys(stored), partition, batch(stored))
    assert 2 * 4 * MIB <= spilled(servers) <= 2 * 6 * MIB
    for number in range(stored):
        read_and_compare(number, partition)


def test_spill_and_durability_together_are_refused_at_start(tmp_path: Path) -> None:
    config = StorageUnitConfig(
        port=0,
        controller=["127.0.0.1:1"],
        backend=BackendChoice(settings={"ssdOffload": {"enabled": True, "path": str(tmp_path)}}),
        directory=str(tmp_path),
        durability="process",
    )
    unit = ServerProcess("unit", "transfer_queue.runtime.storage_unit", config, tmp_path)
    with pytest.raises(StartError, match="ssdOffload and durability process exclude each other"):
        list(wait_until_serving([unit], 60))
    stop_all([unit])


def test_init_starts_units_that_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    offload = {"enabled": True, "path": str(tmp_path / "spill")}
    tq.init({"backend": {"SimpleStorage": {"unit_capacity": CAPACITY, "ssd_offload": offload}}})
    try:
        for number in range(BATCHES):
            tq.kv_batch_put(keys(number), "p", batch(number))
        for number in range(BATCHES):
            read_and_compare(number, "p")
    finally:
        tq.close()


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"path": None}, "ssdOffload.path: name a folder on a local disk"),
        ({"path": "/proc/nowhere"}, "ssdOffload.path: no file can be made in /proc/nowhere"),
        ({"thresholdBytes": "much"}, "ssdOffload: thresholdBytes: 'much' is not a quantity"),
    ],
)
def test_wrong_setting_is_named_at_start(start_queue: StartQueue, offload: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        start_queue(offload=offload)
