"""``init()`` in a Ray cluster: who starts the queue, who finds it, and what ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies, get_placement_group
from transfer_queue.utils.zmq_utils import process_zmq_server_info

import transfer_queue as tq
from tests.integration.ray.cluster import CONF, Driver, RayCluster, wait_for_end
from tests.waiting import wait_until
from transfer_queue.errors import ConfigError, ConnectionLostError, NotInitializedError, StartError, TransferQueueError

pytestmark = pytest.mark.timeout(300)  # seconds; Ray starts a process for each actor

NAMESPACE = "transfer_queue"
WITH_NAME = "{**%r, 'ray': {'name': %r, 'num_cpus': 0.5, 'lifetime': %r}}"


def column(*rows: list[int]) -> TensorDict:
    return TensorDict({"x": torch.tensor(rows)}, batch_size=[len(rows)])


def rows_of(batch: Any) -> list[list[int]]:
    return [row.tolist() for row in batch["x"].unbind()]


def servers(name: str = "TransferQueueController") -> list[int]:
    """Process ids of the controller and the storage units."""
    controller = ray.get_actor(name, NAMESPACE)
    return [ray.get(actor.pid.remote()) for actor in [controller, *ray.get(controller.units.remote())]]


def is_named(name: str) -> bool:
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


@ray.remote(num_cpus=0.5)
class Worker:
    def put(self, key: str, row: list[int]) -> None:
        tq.kv_batch_put([key], "p", column(row))

    def get(self, key: str) -> list[list[int]]:
        return rows_of(tq.kv_batch_get([key], "p"))

    def init(self, conf: dict[str, Any]) -> bool:
        """Whether this process started the queue: one that attaches gets ``conf`` back as it is."""
        return "controller" in (tq.init(conf) or {})

    def close(self) -> None:
        tq.close()


@ray.remote(num_cpus=0.5)
class AsyncWorker:
    async def swap(self, key: str, other: str, row: list[int]) -> list[list[int]]:
        tq.init()
        await tq.async_kv_batch_put([key], "p", column(row))
        return rows_of(await tq.async_kv_batch_get([other], "p"))


@ray.remote(num_cpus=0.5)
def keys_in_a_task() -> list[str]:
    return list(tq.kv_list("p")["p"])


@pytest.fixture(autouse=True)
def no_queue_stays(driver: RayCluster) -> Iterator[None]:
    """A test that fails does not leave its queue to the next one."""
    yield
    tq.close()


def test_driver_actors_and_tasks_use_one_queue(queue: RayCluster) -> None:
    tq.kv_batch_put(["driver"], "p", column([1, 2]))
    worker, asynchronous = Worker.remote(), AsyncWorker.remote()
    ray.get(worker.put.remote("actor", [3, 4]), timeout=60)
    assert ray.get(worker.get.remote("driver"), timeout=60) == [[1, 2]]
    assert ray.get(asynchronous.swap.remote("async", "actor", [5, 6]), timeout=60) == [[3, 4]]
    assert rows_of(tq.kv_batch_get(["async"], "p")) == [[5, 6]]
    optional = tq.kv_batch_get(["async"], "p", ["x", "values"])  # as programs of 0.1.x do, which are all in Ray
    assert list(optional.keys()) == ["x"]
    assert ray.get(keys_in_a_task.remote(), timeout=60) == ["driver", "actor", "async"]


def test_a_second_driver_attaches_and_leaves_without_ending_the_queue(queue: RayCluster) -> None:
    tq.kv_batch_put(["mine"], "p", column([1]))
    with Driver(
        "first = tq.init({'backend': {'SimpleStorage': {'num_data_storage_units': 7}}})\n"
        "tq.kv_batch_put(['theirs'], 'p', column([2]))\n"
        "report(given=first, mine=[row.tolist() for row in tq.kv_batch_get(['mine'], 'p')['x'].unbind()])",
        queue.address,
    ) as other:
        given = {"backend": {"SimpleStorage": {"num_data_storage_units": 7}}}
        assert other.report() == {"given": given, "mine": [[1]]}
        other.finish()
        assert rows_of(tq.kv_batch_get(["theirs"], "p")) == [[2]]


def test_a_driver_in_client_mode_starts_uses_and_ends_a_queue(driver: RayCluster) -> None:
    with Driver(
        f"started = tq.init({WITH_NAME % (CONF, 'remote', None)}) is not None\n"
        "tq.kv_batch_put(['a', 'b'], 'p', column([1], [2]))\n"
        "found = [row.tolist() for row in tq.kv_batch_get(['b', 'a'], 'p')['x'].unbind()]\n"
        "report(started=started, found=found, pids=servers('remote'))\n"
        "tq.close(); tq.close(); sys.stdin.read()",
        driver.client_address,
    ) as program:
        report = program.report()
        assert (report["started"], report["found"]) == (True, [[2], [1]])
        wait_for_end(report["pids"])
        wait_until(lambda: not is_named("remote"), "the controller's name is free", 30)
        program.finish()


def test_a_killed_driver_leaves_no_server_behind(driver: RayCluster) -> None:
    with Driver(
        f"tq.init({WITH_NAME % (CONF, 'doomed', None)})\nreport(pids=servers('doomed'))\nsys.stdin.read()",
        driver.address,
    ) as program:
        pids = program.report()["pids"]
        assert len(pids) == 3
        program.kill()
        wait_for_end(pids)
        wait_until(lambda: not is_named("doomed"), "the controller's name is free", 30)


def test_a_detached_queue_outlives_its_driver_and_close(driver: RayCluster) -> None:
    with Driver(
        f"tq.init({WITH_NAME % (CONF, 'lasting', 'detached')})\ntq.kv_batch_put(['k'], 'p', column([7]))\n"
        "report(pids=servers('lasting'))\ntq.close()",
        driver.address,
    ) as program:
        pids = program.report()["pids"]
        program.finish()
        for _ in range(2):
            assert tq.init({"ray": {"name": "lasting"}}) == {"ray": {"name": "lasting"}}
            assert rows_of(tq.kv_batch_get(["k"], "p")) == [[7]]
            tq.close()
        ray.kill(ray.get_actor("lasting", NAMESPACE))
        wait_for_end(pids)


def test_after_close_a_queue_begins_empty(driver: RayCluster) -> None:
    tq.init(CONF)
    tq.kv_batch_put(["k"], "p", column([1]))
    pids = servers()
    tq.close()
    tq.close()
    wait_for_end(pids)
    with pytest.raises(NotInitializedError):
        tq.kv_list()
    assert tq.init(CONF) is not None
    assert tq.kv_list() == {}
    tq.close()


def test_close_in_an_attached_process_ends_the_queue_for_all(driver: RayCluster) -> None:
    tq.init(CONF)
    pids = servers()
    worker = Worker.remote()
    assert not ray.get(worker.init.remote(CONF), timeout=60)
    ray.get(worker.close.remote(), timeout=60)
    wait_for_end(pids)
    with pytest.raises(ConnectionLostError, match=r"TransferQueueController.*close\(\) was called"):
        tq.kv_list()
    tq.close()
    assert tq.init(CONF) is not None
    tq.close()


def test_of_processes_that_start_at_once_one_starts_the_queue_and_it_ends_with_that_one(driver: RayCluster) -> None:
    conf = {**CONF, "ray": {"name": "contested", "num_cpus": 0.5}}
    workers = [Worker.remote() for _ in range(4)]
    started = ray.get([worker.init.remote(conf) for worker in workers], timeout=100)
    assert sorted(started) == [False, False, False, True]
    pids = servers("contested")
    ray.get(workers[0].put.remote("k", [9]), timeout=60)
    assert ray.get([worker.get.remote("k") for worker in workers], timeout=60) == [[[9]]] * 4
    ray.kill(workers[started.index(True)])
    wait_for_end(pids)


def test_the_death_of_the_controller_actor_is_reported(driver: RayCluster) -> None:
    tq.init(CONF)
    pids = servers()
    ray.kill(ray.get_actor("TransferQueueController", NAMESPACE))
    wait_for_end(pids)
    with pytest.raises(ConnectionLostError, match=r"Ray actor TransferQueueController.*ended: .*; call .*init\(\)"):
        tq.kv_list()
    tq.close()


def test_after_the_controller_process_crashed_a_new_queue_can_be_started(driver: RayCluster) -> None:
    tq.init(CONF)
    controller, *units = servers()
    os.kill(controller, signal.SIGKILL)
    wait_for_end(units)
    with pytest.raises(ConnectionLostError, match="killed by SIGKILL"):
        tq.kv_list()
    assert tq.init(CONF) is not None
    assert tq.kv_list() == {}
    tq.close()


@pytest.mark.parametrize("victim", ["actor", "process"])
def test_a_storage_unit_that_died_comes_back_empty(queue: RayCluster, victim: str) -> None:
    tq.kv_batch_put(["k"], "p", column([3]))
    controller = ray.get_actor("TransferQueueController", NAMESPACE)
    units = ray.get(controller.units.remote())
    before = [ray.get(unit.pid.remote()) for unit in units]
    for unit, pid in zip(units, before, strict=True):
        if victim == "actor":
            ray.kill(unit, no_restart=False)
        else:
            os.kill(pid, signal.SIGKILL)
    wait_for_end(before)
    wait_until(_put_works, "a put succeeds", 120)
    assert rows_of(tq.kv_batch_get(["k"], "p")) == [[4]]


def _put_works() -> bool:
    try:
        tq.kv_batch_put(["k"], "p", column([4]))
    except TransferQueueError:
        return False
    return True


def test_wrong_placement_settings_are_refused_before_anything_starts(driver: RayCluster) -> None:
    for conf, message in [
        ({"backend": {"SimpleStorage": {"required_node_resource": "fast_disk"}}}, "fast_disk.*offered: CPU"),
        ({"ray": {"num_cpus": 100}}, r"ray\.num_cpus: no node"),
        ({"ray": {"nmae": "x"}}, 'unknown field "nmae"; did you mean name?'),
    ]:
        with pytest.raises(ConfigError, match=message):
            tq.init(conf)
        assert not is_named("TransferQueueController")


def test_servers_that_ray_cannot_place_are_reported_and_taken_back(driver: RayCluster) -> None:
    free = ray.available_resources()["CPU"]
    with pytest.raises(StartError, match=r"storage units.*start_timeout.*ray\.num_cpus"):
        tq.init({**CONF, "ray": {"num_cpus": 5, "start_timeout": 10}})
    wait_until(lambda: not is_named("TransferQueueController"), "the controller's name is free", 30)
    wait_until(lambda: ray.available_resources().get("CPU", 0) >= free, "the CPUs are free again", 60)


def test_options_that_a_program_replaces_place_the_servers_that_init_starts(
    driver: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, set[str]]] = []

    def patched(kind: Any) -> Any:
        own = kind.options

        def options(**given: Any) -> Any:
            seen.append((kind.__name__, set(given)))
            return own(**{**given, "num_cpus": 0.25})

        return options

    for kind in (TransferQueueController, SimpleStorageUnit):
        monkeypatch.setattr(kind, "options", patched(kind))
    tq.init(CONF)
    tq.kv_batch_put(["a"], "p", column([1]))
    assert [name for name, _ in seen] == ["TransferQueueController", "SimpleStorageUnit", "SimpleStorageUnit"]
    assert all("num_cpus" in given for _, given in seen)
    total = ray.cluster_resources()["CPU"]
    wait_until(lambda: total - ray.available_resources()["CPU"] == 0.75, "each of three servers reserves 0.25 CPUs", 60)
    tq.close()


def test_the_named_controller_answers_the_calls_of_earlier_releases(driver: RayCluster) -> None:
    merged = tq.init(CONF)
    assert merged is not None
    tq.kv_batch_put(["a", "b"], "p", column([1], [2]), tags=[{"n": 1}, {"n": 2}])
    controller = ray.get_actor("TransferQueueController", NAMESPACE)
    config = ray.get(controller.get_config.remote())
    assert config.controller.zmq_info == merged.controller.zmq_info == process_zmq_server_info(controller)
    assert ray.get(controller.list_partitions.remote()) == ["p"]
    meta = ray.get(controller.get_metadata.remote(["x"], "p", mode="fetch", task_name="t", batch_size=1))
    assert meta.global_indexes == [0]
    _, consumed = ray.get(controller.get_consumption_status.remote("p", "t"))
    assert consumed.tolist() == [1, 0]
    _, produced = ray.get(controller.get_production_status.remote("p", ["x"]))
    assert produced.tolist() == [[1], [1]]
    assert ray.get(controller.reset_consumption.remote("p", "t")) is True
    assert ray.get(controller.kv_retrieve_keys.remote([1, 0], "p")) == ["b", "a"]
    assert ray.get(controller.kv_retrieve_meta.remote(["b"], "p")).global_indexes == [1]
    ray.get(controller.clear_partition.remote("p"))
    assert tq.get_client().get_partition_list() == []
    tq.close()


@ray.remote(num_cpus=0.25)
class OldWorker:
    """What workers of 0.1.5 do: a client of their own for the controller that they were told, and no ``init``."""

    def __init__(self, name: str, infos: dict[str, Any]) -> None:
        self.client = tq.TransferQueueClient(name, infos["controller_info"])
        self.client.initialize_storage_manager("AsyncSimpleStorageManager", infos)

    def put(self, *rows: list[int]) -> list[int]:
        return list(self.client.put(column(*rows), partition_id="step_0").global_indexes)


@ray.remote(num_cpus=0.25)
class OldAsyncWorker:
    def __init__(self, name: str, infos: dict[str, Any]) -> None:
        self.client = tq.AsyncTransferQueueClient(name, infos["controller_info"])
        self.client.initialize_storage_manager("AsyncSimpleStorageManager", infos)

    async def take(self, rows: int) -> tuple[bool, list[list[int]]]:
        meta = await self.client.async_get_meta(["x"], rows, "step_0", task_name="train", timeout=60)
        data = await self.client.async_get_data(meta)
        return data["x"].is_nested, sorted(rows_of(data))


def test_actors_use_a_queue_that_the_program_makes_of_actors_without_init(driver: RayCluster) -> None:
    units = {
        rank: SimpleStorageUnit.options(num_cpus=0.25).remote(1024, config={"unit_capacity": "16Mi"})
        for rank in range(2)
    }
    controller = TransferQueueController.options(num_cpus=0.25).remote()
    infos = {
        "controller_info": process_zmq_server_info(controller),
        "storage_unit_infos": process_zmq_server_info(units),
    }
    writers = [OldWorker.remote(f"writer{number}", infos) for number in range(2)]
    taken = OldAsyncWorker.remote("reader", infos).take.remote(3)
    put = ray.get([writer.put.remote([number, 1], [number, 2]) for number, writer in enumerate(writers)])
    assert sorted(index % 4 for indexes in put for index in indexes) == [0, 1, 2, 3]
    nested, rows = ray.get(taken)
    assert not nested, "0.1.5 gives dense columns"
    assert len(rows) == 3
    assert all(row in ([0, 1], [0, 2], [1, 1], [1, 2]) for row in rows)
    assert ray.get(controller.list_partitions.remote()) == ["step_0"]
    _, consumed = ray.get(controller.get_consumption_status.remote("step_0", "train"))
    assert sorted(consumed.tolist()) == [0, 1, 1, 1]
    for server in (*units.values(), controller):
        ray.get(server.shutdown.remote())


def test_actors_of_a_program_are_placed_by_the_helpers_of_earlier_releases(driver: RayCluster) -> None:
    group = get_placement_group(2, num_cpus_per_actor=0.25)
    assert [bundle["CPU"] for bundle in group.bundle_specs] == [0.25, 0.25]
    ray.util.remove_placement_group(group)
    strategies = get_node_round_robin_scheduling_strategies(3)
    assert [strategy.node_id for strategy in strategies] == [ray.nodes()[0]["NodeID"]] * 3
    with pytest.raises(ValueError, match=r"required_node_resource.*'no_such_thing'"):
        get_node_round_robin_scheduling_strategies(1, "no_such_thing")
    with pytest.raises(ValueError, match="num_actors"):
        get_node_round_robin_scheduling_strategies(0)
    with pytest.raises(ValueError, match="num_ray_actors"):
        get_placement_group(0)
