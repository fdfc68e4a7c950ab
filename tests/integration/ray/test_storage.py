"""Backend ``ray``: blocks in the object store, owned by an actor for each storage unit."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.integration.ray.cluster import Driver, RayCluster, wait_for_end
from tests.waiting import wait_until
from transfer_queue.control.directory import shard_of
from transfer_queue.errors import (
    CapacityError,
    ConfigError,
    ConnectionLostError,
    DataLostError,
    StorageKeyNotFoundError,
)

pytestmark = pytest.mark.timeout(300)  # seconds; Ray starts a process for each actor

CONF: dict[str, Any] = {
    "backend": {"storage_backend": "RayStore", "SimpleStorage": {"unit_capacity": "16Mi"}},
    "ray": {"name": "ray-store", "num_cpus": 0.5},
}
LOST = (StorageKeyNotFoundError, DataLostError)


@pytest.fixture(scope="module")
def store(driver: RayCluster) -> Iterator[RayCluster]:
    tq.init(CONF)
    yield driver
    tq.close()


def owners() -> list[Any]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return [ray.get_actor(**actor) for actor in found if actor["name"].startswith("tq-blocks-")]


def usage() -> list[int]:
    """(bytes, blocks) of all units together."""
    return [sum(values) for values in zip(*ray.get([owner.usage.remote() for owner in owners()]), strict=True)]


def mixed(rows: int, width: int) -> TensorDict:
    ragged = torch.nested.as_nested_tensor(
        [torch.arange(width + number, dtype=torch.float32) for number in range(rows)], layout=torch.jagged
    )
    return TensorDict(
        {
            "dense": torch.arange(rows * width).reshape(rows, width),
            "ragged": ragged,
            "text": NonTensorStack(*[f"row {number}" for number in range(rows)]),
            "object": NonTensorStack(*[{"number": number} for number in range(rows)]),
        },
        batch_size=[rows],
    )


def check(batch: TensorDict, numbers: list[int], width: int) -> None:
    for row, number in enumerate(numbers):
        if "dense" in batch.keys():  # noqa: SIM118 (a TensorDict's own membership test differs)
            assert batch["dense"][row].tolist() == list(range(number * width, (number + 1) * width))
        if "ragged" in batch.keys():  # noqa: SIM118
            assert batch["ragged"][row].tolist() == [float(value) for value in range(width + number)]
    assert list(batch["text"]) == [f"row {number}" for number in numbers]


@ray.remote(num_cpus=0.5)
class Writer:
    def put(self, keys: list[str], width: int) -> None:
        tq.init(CONF)
        tq.kv_batch_put(keys, "writer", mixed(len(keys), width))


def test_several_controllers_share_the_units_and_end_together(driver: RayCluster) -> None:
    tq.init({**CONF, "controller": {"shards": 2}, "ray": {"name": "ray-shards", "num_cpus": 0.5}})
    names = [next(name for name in map(str, range(99)) if shard_of(name, 2) == shard) for shard in range(2)]
    for name in names:
        tq.kv_batch_put(["a", "b"], name, mixed(2, 50_000))
    for name in names:
        check(tq.kv_batch_get(["a", "b"], name), [0, 1], 50_000)
        tq.kv_clear(["a", "b"], name)
    wait_until(lambda: usage() == [0, 0], "the blocks of both are freed")
    controller = ray.get_actor("ray-shards", "transfer_queue")
    pids = [ray.get(unit.pid.remote()) for unit in ray.get(controller.units.remote())]
    address = ray.get(controller.addresses.remote())[1]
    port = int(address.rsplit(":", 1)[1])
    listening = (each for each in psutil.process_iter() if each.pid and _listens(each, port))
    next(listening).kill()
    wait_for_end(pids)
    with pytest.raises(ConnectionLostError, match="controller-1 ended: killed by SIGKILL"):
        tq.kv_list()
    tq.close()


@pytest.mark.parametrize("width", [3, 20_000], ids=["small", "large"])
def test_values_come_back_whole_and_in_part(store: RayCluster, width: int) -> None:
    keys = [f"k{number}" for number in range(6)]
    tq.kv_batch_put(keys, "whole", mixed(6, width))
    batch = tq.kv_batch_get(keys, "whole")
    check(batch, list(range(6)), width)
    assert list(batch["object"]) == [{"number": number} for number in range(6)]
    part = tq.kv_batch_get(["k4", "k1", "k4"], "whole", ["ragged", "text"])
    assert sorted(part.keys()) == ["ragged", "text"]
    check(part, [4, 1, 4], width)
    batch["dense"][0] += 1  # the values are the caller's own
    check(tq.kv_batch_get(["k0"], "whole"), [0], width)
    tq.kv_clear(keys, "whole")
    wait_until(lambda: usage() == [0, 0], "the blocks are freed")


def test_rows_outlive_the_process_that_put_them(store: RayCluster) -> None:
    writer = Writer.remote()
    ray.get(writer.put.remote(["a", "b"], 50_000), timeout=60)
    ray.kill(writer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.put.remote(["c"], 1), timeout=60)
    check(tq.kv_batch_get(["a", "b"], "writer"), [0, 1], 50_000)
    tq.kv_clear(["a", "b"], "writer")
    wait_until(lambda: usage() == [0, 0], "the blocks are freed")


def test_a_driver_in_client_mode_puts_and_gets(store: RayCluster) -> None:
    with Driver(
        f"tq.init({CONF!r})\ntq.kv_batch_put(['far'], 'p', column(list(range(50_000))))\n"
        "report(sum=int(tq.kv_batch_get(['far'], 'p')['x'].values().sum()))",
        store.client_address,
    ) as program:
        assert program.report() == {"sum": sum(range(50_000))}
        program.finish()
        assert tq.kv_batch_get(["far"], "p")["x"].values().tolist() == list(range(50_000))
        tq.kv_clear(["far"], "p")


def test_a_full_store_is_refused_and_takes_rows_again_once_some_are_cleared(
    store: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = TensorDict({"x": torch.zeros(1, 10 << 20, dtype=torch.uint8)}, batch_size=[1])
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    client = tq.TransferQueueClient("impatient", tq.get_client().config)
    for number in range(2):
        client.put(big, partition_id=f"full-{number}")
    with pytest.raises(CapacityError, match="no capacity left"):
        client.put(big, partition_id="full-2")
    client.clear_partition("full-0")
    wait_until(lambda: usage()[0] < 16 << 20, "the block is freed")
    client.put(big, partition_id="full-2")
    for number in (1, 2):
        client.clear_partition(f"full-{number}")
    client.close()
    wait_until(lambda: usage() == [0, 0], "the blocks are freed")


@ray.remote(num_cpus=0)
class Mortal:
    def put(self) -> list[Any]:
        return [ray.put(np.zeros(1 << 20, np.uint8))]


def _is_lost(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=30)
    except ray.exceptions.OwnerDiedError:
        return True
    return False


def test_a_lost_object_is_an_error_that_says_so(store: RayCluster) -> None:
    tq.kv_batch_put(["k"], "lost", mixed(1, 50_000))
    mortal = Mortal.remote()
    object_of_mortal = ray.get(mortal.put.remote(), timeout=60)
    for owner in owners():
        exchanged = owner.__ray_call__.remote(
            lambda self, other: self._contents.update(dict.fromkeys(self._contents, other)), object_of_mortal
        )
        ray.get(exchanged, timeout=60)
    ray.kill(mortal)
    wait_until(lambda: _is_lost(object_of_mortal[0]), "the object is lost", 60)
    with pytest.raises(StorageKeyNotFoundError, match=r"lost from Ray's object store \(OwnerDiedError\)"):
        tq.kv_batch_get(["k"], "lost")
    tq.kv_clear(["k"], "lost")


def test_the_loss_of_the_owners_loses_the_rows_and_nothing_else(store: RayCluster) -> None:
    tq.kv_batch_put(["k"], "owner", mixed(1, 50_000))
    before = {owner._actor_id for owner in owners()}
    for owner in owners():
        ray.kill(owner)
    wait_until(lambda: len({owner._actor_id for owner in owners()} - before) == 2, "new owners", 60)
    with pytest.raises(LOST):
        tq.kv_batch_get(["k"], "owner")
    tq.kv_batch_put(["k"], "owner", mixed(1, 50_000))
    check(tq.kv_batch_get(["k"], "owner"), [0], 50_000)
    tq.kv_clear(["k"], "owner")


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        return any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp"))
    except psutil.Error:
        return False


def test_close_ends_the_units_and_their_owners(store: RayCluster) -> None:
    controller = ray.get_actor("ray-store", "transfer_queue")
    pids = [ray.get(actor.pid.remote()) for actor in [controller, *ray.get(controller.units.remote())]]
    tq.close()
    wait_for_end(pids)
    wait_until(lambda: owners() == [], "the owners end", 60)


def test_without_ray_the_backend_is_refused(driver: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"'RayStore' needs Ray; call ray\.init\(\)"):
        tq.init(CONF)


def test_a_mooncake_queue_brings_its_master_which_ends_with_it(driver: RayCluster) -> None:
    section = {"global_segment_size": "64Mi", "local_buffer_size": "16Mi", "protocol": "tcp"}
    conf = {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": section}, "ray": {"num_cpus": 0.5}}
    merged = tq.init(conf)
    try:
        assert merged is not None
        host, _, port = merged.backend.MooncakeStore.master_server_address.rpartition(":")
        tq.kv_batch_put(keys=["a", "b"], partition_id="p", fields=TensorDict({"x": torch.arange(2)}, [2]))
        assert tq.kv_batch_get(["b", "a"], "p")["x"].tolist() == [1, 0]
        socket.create_connection((host, int(port))).close()
    finally:
        tq.close()
    wait_until(lambda: _refused(host, int(port)), "the master has ended")


def _refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return True
    return False
