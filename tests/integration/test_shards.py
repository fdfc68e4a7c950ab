"""A queue of three controllers: every partition on one of them, and no fault of one of them felt elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.test_checkpoint import content, fill, without_indexes
from tests.waiting import wait_until
from transfer_queue.cli.connection import ControllerConnection
from transfer_queue.client.draining import drain_unit, undrain_unit
from transfer_queue.client.draining import main as draining
from transfer_queue.client.engine import Engine
from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import engines_of
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.config.processes import SamplerChoice, Timing
from transfer_queue.control.commands import Clear, ListKeys, Moved, Snapshot
from transfer_queue.control.directory import shard_of
from transfer_queue.dataloader import StreamingDataset, mark_end
from transfer_queue.errors import ConfigError, ConnectionLostError, QueueNotEmptyError, RequestError, StartError
from transfer_queue.launch import local
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.launch.plan import LocalPlan
from transfer_queue.launch.process import ServerProcess, stop_all, wait_until_serving
from transfer_queue.wire.messages import Capture, EndCapture, Resume

SHARDS = 3
DEAD = 2
"""The shard that is killed."""


def partition_on(shard: int, what: str = "p") -> str:
    """A name that no other test uses, of a partition on that shard."""
    return next(name for name in iter(lambda: f"{what}-{uuid.uuid4().hex}", "") if shard_of(name, SHARDS) == shard)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    plan = default_plan(units=2, unit_capacity=64 << 20, shards=SHARDS, sampler=SamplerChoice(name="RankAwareSampler"))
    timing = {"timing": Timing(heartbeat=0.3, reconnect_grace=1.0)}
    units = tuple(unit.model_copy(update=timing) for unit in plan.units)
    controller = plan.controller.model_copy(update=timing)
    made = LocalStack(replace(plan, controller=controller, units=units))
    with preloaded.servers():
        made.start()
    with made as running:
        yield running


@pytest.fixture
def client(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    """Attached through one controller, as ``TQ_CONTROLLER_ADDRESS`` may name just one."""
    monkeypatch.setenv("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "3")
    tq.init({"controller": {"addresses": [stack.controller_addresses[1]]}, "security": {"allowPickle": True}})
    yield tq.get_client()
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)
    tq.close()


def batch(seed: int, rows: int = 6) -> TensorDict:
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 20_000, generator=random)  # through shared memory; the others travel with the request
    ragged = [torch.full((number % 4,), seed + number) for number in range(rows)]
    text = [f"text {seed} {number}" for number in range(rows)]
    fields = {"wide": wide, "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged), "text": text}
    return TensorDict(fields, batch_size=[rows])


def same(found: TensorDict, put: TensorDict) -> bool:
    wide = found["wide"].to_padded_tensor(0) if found["wide"].is_nested else found["wide"]
    ragged = zip(found["ragged"].unbind(), put["ragged"].unbind(), strict=True)
    return (
        torch.equal(wide, put["wide"])
        and all(torch.equal(one, other) for one, other in ragged)
        and found["text"].tolist() == put["text"].tolist()
    )


def kill(stack: LocalStack) -> ServerProcess:
    victim = stack.processes[DEAD]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(victim.failure, "the controller is dead")
    return victim


def used(stack: LocalStack) -> int:
    """Bytes in the storage units, as all controllers heard last."""
    with ControllerConnection(stack.attach_config) as link:
        return sum(unit["used"] for unit in link.look()["units"])


# ------------------------------------------------------------------------------------------------------- one queue


def test_partitions_lie_on_all_shards_and_come_back_as_they_were_put(client: tq.TransferQueueClient) -> None:
    names = [partition_on(number % SHARDS) for number in range(9)]
    metas = [client.put(batch(seed), partition_id=name) for seed, name in enumerate(names)]
    assert all(same(client.get_data(meta), batch(seed)) for seed, meta in enumerate(metas))
    indexes = [index for meta in metas for index in meta.global_indexes]
    assert len(set(indexes)) == len(indexes) == 54
    everything = tq.BatchMeta.concat(metas)  # rows of all shards in one get
    assert same(client.get_data(everything)[6:12], batch(1))
    for name in names:
        client.clear_partition(name)


def test_lists_are_of_all_shards(client: tq.TransferQueueClient, stack: LocalStack) -> None:
    names = [partition_on(shard) for shard in range(SHARDS)]
    for number, name in enumerate(names):
        tq.kv_batch_put(["a", "b"], name, TensorDict({"x": torch.arange(2)}, batch_size=[2]), [{"n": number}] * 2)
    listed = tq.kv_list()
    assert {name: listed[name] for name in names} == {
        name: {"a": {"n": number}, "b": {"n": number}} for number, name in enumerate(names)
    }
    assert set(names) <= set(client.get_partition_list())
    assert tq.kv_list(names[0]) == {names[0]: listed[names[0]]}
    with ControllerConnection(stack.attach_config) as link:
        picture = link.look()
        assert {item["name"]: item["rows"] for item in picture["partitions"] if item["name"] in names} == dict.fromkeys(
            names, 2
        )
        assert sorted(unit["name"] for unit in picture["units"]) == ["storage-0", "storage-1"]
        assert picture["clients"] >= 2
        assert link.request(ListKeys(names[2])).value == {names[2]: listed[names[2]]}
        for name in names:
            link.request(Clear(name))
        assert not set(names) & set(link.request(ListKeys("")).value)


def test_what_is_cleared_frees_its_storage_whichever_shard_had_it(
    client: tq.TransferQueueClient, stack: LocalStack
) -> None:
    wait_until(lambda: used(stack) == 0, "earlier tests have left nothing")
    names = [partition_on(shard) for shard in range(SHARDS)]
    for name in names:
        client.put(batch(0), partition_id=name)
    wait_until(lambda: used(stack) >= SHARDS * 6 * 20_000 * 4, "the units report what they hold")
    for name in names:
        client.clear_partition(name)
    wait_until(lambda: used(stack) == 0, "everything is freed")


def test_streams_end_and_ranks_share_the_rows_of_a_partition(client: tq.TransferQueueClient) -> None:
    name = partition_on(0)
    for start in range(0, 10, 5):
        client.put(TensorDict({"x": torch.arange(start, start + 5)}, batch_size=[5]), partition_id=name)
    mark_end(name)
    seen = [
        [td["x"].tolist() for td, _ in StreamingDataset(None, 4, 4, ["x"], name, task_name=task, dp_rank=rank)]
        for task, rank in (("train", 0), ("train", 1), ("other", 1))
    ]
    assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], [], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]


def test_a_unit_is_emptied_of_the_blocks_of_all_shards(client: tq.TransferQueueClient, stack: LocalStack) -> None:
    metas = [client.put(batch(seed), partition_id=partition_on(seed % SHARDS)) for seed in range(6)]
    reports: list[int] = []
    first = stack.controller_addresses[:1]
    done = asyncio.run(drain_unit(first, "storage-0", progress=lambda now: reports.append(now.blocks)))
    assert done.blocks >= 2
    assert reports[-1] == done.blocks
    with ControllerConnection(stack.attach_config) as link:
        wait_until(lambda: 0 in [unit["used"] for unit in link.look()["units"]], "the unit is empty")
    assert all(same(client.get_data(meta), batch(seed)) for seed, meta in enumerate(metas))
    asyncio.run(undrain_unit(first, "storage-0"))
    for meta in metas:
        client.clear_samples(meta)


def test_the_hook_of_a_pod_empties_its_unit_of_the_blocks_of_all_shards(
    client: tq.TransferQueueClient, stack: LocalStack
) -> None:
    metas = [client.put(batch(seed), partition_id=partition_on(seed % SHARDS)) for seed in range(6)]
    config = ["--config", str(stack.directory / "storage-1.json")]
    assert draining(config) == 0
    with ControllerConnection(stack.attach_config) as link:
        wait_until(lambda: 0 in [unit["used"] for unit in link.look()["units"]], "the unit is empty")
    assert all(same(client.get_data(meta), batch(seed)) for seed, meta in enumerate(metas))
    assert draining([*config, "--cancel"]) == 0
    for meta in metas:
        client.clear_samples(meta)


def test_forwarded_ports_of_all_shards_are_enough_for_the_tools(
    client: tq.TransferQueueClient, stack: LocalStack
) -> None:
    """As ``kubectl tq top`` reaches them: what they say of their own addresses is of no use there."""
    names = [partition_on(shard) for shard in range(SHARDS)]
    for name in names:
        client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id=name)
    forwarded = [address.replace("127.0.0.1", "localhost") for address in stack.controller_addresses]
    shuffled = AttachConfig(controller=ControllerAddresses(addresses=[*forwarded[1:], forwarded[0]]))
    with ControllerConnection(shuffled) as link:
        assert set(names) <= {partition["name"] for partition in link.look()["partitions"]}
        assert [line.addresses for line in link._lines] == [[address] for address in forwarded]
    with ControllerConnection(AttachConfig(controller=ControllerAddresses(addresses=forwarded[:1]))) as link:
        link.look()
        assert [line.addresses for line in link._lines] == [[address] for address in stack.controller_addresses]


# ---------------------------------------------------------------------------------------------------------- checkpoints


@contextmanager
def attached(shards: int) -> Iterator[LocalStack]:
    """This process attached to a queue of its own."""
    with preloaded.servers(), LocalStack(default_plan(units=2, unit_capacity=64 << 20, shards=shards)).start() as stack:
        tq.init({"controller": {"addresses": [stack.controller_addresses[0]]}, "security": {"allowPickle": True}})
        try:
            yield stack
        finally:
            tq.close()


def seen() -> Any:
    """The order of the partitions depends on the controllers that they are on."""
    return {**without_indexes(content()), "order": sorted(list(keys) for keys in tq.kv_list().values())}


def test_a_checkpoint_goes_from_any_number_of_controllers_to_any_other(tmp_path: Path) -> None:
    with attached(SHARDS):
        fill()
        for shard in range(SHARDS):
            tq.kv_put("k", partition_on(shard), {"x": torch.full((3,), shard)}, tag={"shard": shard})
        before = seen()
        tq.save_checkpoint(tmp_path / str(SHARDS))
        tq.kv_put("later", partition_on(0), {"x": torch.ones(1)})
        tq.load_checkpoint(tmp_path / str(SHARDS))
        assert seen() == before
    for shards, saved in ((1, SHARDS), (2, 1), (3, 2)):
        with attached(shards):
            tq.load_checkpoint(tmp_path / str(saved), replace=False)
            assert seen() == before
            with pytest.raises(QueueNotEmptyError):
                tq.load_checkpoint(tmp_path / str(saved), replace=False)
            tq.save_checkpoint(tmp_path / str(shards))
            fresh = tq.get_client().get_meta(["x"], 13, "rows", task_name="train")
            assert tq.get_client().get_data(fresh)["x"].tolist() == list(range(7, 20))


def test_a_checkpoint_of_several_controllers_is_one_moment(
    client: tq.TransferQueueClient, stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer writes each step to a partition on each controller in turn. At any moment the steps differ by one,
    also when the last controller is asked late."""
    partitions = [partition_on(shard) for shard in range(SHARDS)]
    stop = threading.Event()

    transfer = Engine.transfer

    async def late_to_the_last(engine: Engine, message: Any, *rest: Any) -> Any:
        if isinstance(message, Capture) and engine.shard is not None and engine.shard.number == SHARDS - 1:
            await asyncio.sleep(0.2)
        return await transfer(engine, message, *rest)

    monkeypatch.setattr(Engine, "transfer", late_to_the_last)

    def produce() -> None:
        producer = tq.TransferQueueClient("producer", stack.controller_addresses[0])
        for step in itertools.count():
            for partition in partitions:
                producer.run(producer.kv.put_one, "k", partition, None, {"step": step}, None)
            if stop.is_set():
                break
        producer.close()

    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(produce)
        wait_until(lambda: len(tq.kv_list()) == SHARDS, "the producer produces")
        for number in range(3):
            tq.save_checkpoint(tmp_path / str(number))
        stop.set()
        producing.result(60)
    for number in range(3):
        tq.load_checkpoint(tmp_path / str(number))
        steps = [tq.kv_list(name)[name]["k"]["step"] for name in partitions]
        assert steps == sorted(steps, reverse=True)
        assert steps[0] - steps[-1] <= 1


def test_rows_of_every_controller_are_counted_before_a_save_and_dumped_with_their_fields(
    client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    names = [partition_on(shard) for shard in range(SHARDS)]
    for shard, name in enumerate(names):
        tq.kv_put("k", name, {"x": torch.full((3,), shard)})
    assert client.run(client.rows.row_counts) == dict.fromkeys(names, 1)
    for shard, name in enumerate(names):
        tq.dump_data_by_key(tmp_path / name, "k", name)
        tq.kv_clear("k", name)
        tq.load_data_by_key(tmp_path / name)
        assert tq.kv_batch_get("k", name)["x"][0].tolist() == [shard] * 3


def test_a_hold_puts_off_changes_but_neither_reads_nor_locks(client: tq.TransferQueueClient) -> None:
    partition = partition_on(0)
    tq.kv_put("k", partition, tag={"n": 1})
    engine = engines_of(client.engine)[0]
    client.run(Operation, engine.transfer(Capture(True), (), 60), lambda payload: payload)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(tq.kv_put, "k", partition, tag={"n": 2})
        with tq.kv_global_lock("k", partition, timeout=5):
            assert tq.kv_list(partition)[partition]["k"] == {"n": 1}
        assert not putting.done()
        client.run(Operation, engine.transfer(Resume(), (), 60), lambda payload: payload)
        putting.result(60)
    assert tq.kv_list(partition)[partition]["k"] == {"n": 2}
    with pytest.raises(RequestError, match="the hold of this capture ended"):
        client.run(Operation, engine.transfer(Resume(), (), 60), lambda payload: payload)
    client.run(Operation, engine.transfer(EndCapture(), (), 60), lambda payload: payload)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_controller_sends_those_who_ask_for_partitions_of_others_on(stack: LocalStack) -> None:
    with ControllerConnection(stack.attach_config) as link:
        link.look()
        assert link._loop.run_until_complete(link._lines[0].request(Clear(partition_on(1)))) == Moved(1)


def add_to(partition: str, times: int) -> None:
    for _ in range(times):
        tq.kv_update("n", partition, "n", torch.tensor(1), lambda old, new: old + new)


def count(partition: str) -> int:
    return int(tq.kv_batch_get("n", partition)["n"][0])


@pytest.mark.usefixtures("client")
def test_locks_and_updates_of_partitions_on_different_shards_do_not_meet() -> None:
    names = [partition_on(shard) for shard in range(SHARDS)]
    for name in names:
        tq.kv_put("n", name, {"n": torch.tensor(0)})
    with tq.kv_global_lock("n", names[0]) as lock, ThreadPoolExecutor() as pool:  # a thread is a holder of its own

        def take(name: str) -> int:
            with tq.kv_global_lock("n", name, timeout=0.01) as taken:
                tq.kv_put("n", name, {"n": torch.tensor(0)}, lock=taken)
                return taken.number

        with pytest.raises(tq.WaitTimeoutError, match="holds or waits for"):
            pool.submit(take, names[0]).result()
        assert all(pool.submit(take, name).result() > 0 for name in names[1:])
        with pytest.raises(tq.InvalidInputError, match="cannot guard a put"):
            tq.kv_put("n", names[1], {"n": torch.tensor(9)}, lock=lock)
        done = list(pool.map(add_to, names * 2, [10] * 2 * SHARDS))
    assert len(done) == 2 * SHARDS
    assert [count(name) for name in names] == [20] * SHARDS


# ----------------------------------------------------------------------------------------------------- one that is gone


def test_a_dead_controller_costs_its_own_partitions_only(client: tq.TransferQueueClient, stack: LocalStack) -> None:
    names = [partition_on(shard) for shard in range(SHARDS)]
    metas = [client.put(batch(shard), partition_id=name) for shard, name in enumerate(names)]
    victim = kill(stack)
    late = tq.TransferQueueClient("late", stack.attach_config)  # attaching needs one controller, not all
    with ThreadPoolExecutor() as pool:  # each waits for the controller as long as a request may take
        calls = [
            pool.submit(client.get_data, metas[DEAD]),
            pool.submit(client.put, batch(9), partition_id=names[DEAD]),
            pool.submit(client.get_partition_list),
            pool.submit(late.put, batch(9), partition_id=names[DEAD]),
        ]
        for call in calls:
            with pytest.raises(ConnectionLostError, match=f"controller shard {DEAD}"):
                call.result()
    for shard in {*range(SHARDS)} - {DEAD}:
        assert same(client.get_data(metas[shard]), batch(shard))
        assert same(late.get_data(late.put(batch(shard + 5), partition_id=names[shard])), batch(shard + 5))
        mark_end(names[shard])
        stream = StreamingDataset(None, 12, 12, ["text"], names[shard], task_name="t", dp_rank=0)
        assert [len(meta) for _, meta in stream] == [12]

    stack.restart_ended()
    assert stack.processes[DEAD].pid != victim.pid
    assert stack.failure() is None
    meta = wait_until(lambda: try_put(late, names[DEAD]), "the new controller serves the old client")
    assert same(late.get_data(meta), batch(7))
    assert client.kv_list(names[DEAD]) == {names[DEAD]: {}}
    assert same(client.get_data(metas[0]), batch(0))
    late.close()
    for name in names:
        client.clear_partition(name)
    wait_until(lambda: used(stack) == 0, "blocks of the dead controller's rows are freed as well")


def try_put(client: tq.TransferQueueClient, partition: str) -> tq.BatchMeta | None:
    try:
        return client.put(batch(7), partition_id=partition)
    except ConnectionLostError:
        return None


def test_a_client_of_other_controllers_than_there_are_now_is_told_so(stack: LocalStack, tmp_path: Path) -> None:
    client = tq.TransferQueueClient("old", stack.attach_config)
    name = partition_on(DEAD)
    client.put(batch(0), partition_id=name)
    victim = kill(stack)
    settings = stack.plan.controllers([int(address.rsplit(":", 1)[1]) for address in stack.controller_addresses])[DEAD]
    alone = settings.model_copy(update={"shards": [], "shard": 0})
    other = ServerProcess("other", "transfer_queue.runtime.controller", alone, tmp_path)
    try:
        for _ in wait_until_serving([other], 60.0):
            with pytest.raises(ConnectionLostError, match="belongs to a queue of other controllers"):
                client.kv_list(name)
    finally:
        stop_all([other])
    client.close()
    assert victim.failure()
    stack.restart_ended()


def test_a_program_starts_several_controllers_and_hears_when_one_ends() -> None:
    sizes = {"unit_capacity": "16Mi", "num_data_storage_units": 1}
    with pytest.raises(ConfigError, match="total_storage_size: 2 rows are too few for controller"):
        tq.init({"controller": {"shards": 3}, "backend": {"SimpleStorage": {**sizes, "total_storage_size": 2}}})
    merged = tq.init({"controller": {"shards": SHARDS}, "backend": {"SimpleStorage": sizes}})
    try:
        assert merged is not None
        assert list(merged.backend.SimpleStorage.zmq_info) == ["storage-0"]
        names = [partition_on(shard) for shard in range(SHARDS)]
        for name in names:
            tq.kv_put("k", name, {"x": torch.ones(2)})
        assert set(tq.kv_list()) == set(names)
        children = psutil.process_iter(["ppid", "cmdline"])  # None for one that ends meanwhile
        ours = [child for child in children if child.info["ppid"] == os.getpid()]
        victims = [child for child in ours if "controller-2.json" in str(child.info["cmdline"])]
        assert len(victims) == 1
        victims[0].kill()
        wait_until(lambda: _ended(names[0]), "the program hears of it")
    finally:
        tq.close()


def _ended(partition: str) -> bool:
    try:
        tq.kv_list(partition)
    except ConnectionLostError as error:
        return "controller-2 ended: killed by SIGKILL" in str(error)
    return False


# ----------------------------------------------------------------------------------------------------------- durability


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[LocalPlan]:
    plan = default_plan(units=1, unit_capacity=16 << 20, shards=2)
    name = f"durable-{uuid.uuid4().hex[:8]}"
    units = tuple(unit.model_copy(update={"durability": "process"}) for unit in plan.units)
    controller = plan.controller.model_copy(update={"name": name, "durability": "process"})
    yield LocalPlan(name, controller, units, shards=2)
    for folder in local.SHARED_MEMORY.glob(f"transferqueue-*/{name}"):
        shutil.rmtree(folder)


def test_rows_of_all_shards_outlive_their_controllers_and_the_queue(durable: LocalPlan, tmp_path: Path) -> None:
    names = [next(f"step-{n}" for n in range(99) if shard_of(f"step-{n}", 2) == shard) for shard in range(2)]
    with preloaded.servers(), LocalStack(durable, tmp_path).start() as stack:
        client = tq.TransferQueueClient("first", stack.attach_config)
        metas = [client.put(batch(seed), partition_id=name) for seed, name in enumerate(names)]
        os.kill(stack.processes[1].pid, signal.SIGKILL)
        wait_until(stack.failure, "a controller is dead")
        stack.restart_ended()
        assert all(same(client.get_data(meta), batch(seed)) for seed, meta in enumerate(metas))
        client.close()
    with preloaded.servers(), LocalStack(durable, tmp_path).start() as stack:
        client = tq.TransferQueueClient("second", stack.attach_config)
        assert all(same(client.get_data(meta), batch(seed)) for seed, meta in enumerate(metas))
        client.close()
    for shards in (1, 3):
        plan = LocalPlan(durable.name, durable.controller, durable.units, shards=shards)
        with pytest.raises(StartError, match=f"another number of controllers than {shards}"):
            LocalStack(plan, tmp_path).start()


def test_locks_and_updates_outlive_a_durable_controller(durable: LocalPlan, tmp_path: Path) -> None:
    name = next(name for name in iter(lambda: uuid.uuid4().hex, "") if shard_of(name, 2) == 1)
    with preloaded.servers(), LocalStack(durable, tmp_path).start() as stack, ThreadPoolExecutor() as pool:
        tq.init({"controller": {"addresses": stack.controller_addresses}})
        tq.kv_put("n", name, {"n": torch.tensor(0)})
        with tq.kv_global_lock(["lock", "n"], name, lease_s=60) as lock:
            numbers = [pool.submit(fenced, name) for _ in range(2)]
            wait_until(lambda: snapshot(1)["lock_waiting"] == 2, "both wait")
            kill_shard(stack, 1)
            updates = pool.submit(add_to, name, 5)
            stack.restart_ended()
            tq.kv_put("n", name, {"m": torch.tensor(1)}, lock=lock)
            updates.result()
            wait_until(lambda: snapshot(1)["lock_waiting"] == 2, "both wait again")
            lock.check()
        assert sorted(number.result() for number in numbers) == [lock.number + 1, lock.number + 2]
        assert count(name) == 5
        tq.close()


def fenced(partition: str) -> int:
    with tq.kv_global_lock(["lock", "n"], partition, timeout=120) as lock:
        tq.kv_put("n", partition, {"holder": torch.tensor(lock.number)}, lock=lock)
        return lock.number


def snapshot(shard: int) -> Any:
    """Counts of one controller."""
    engine = engines_of(tq.get_client().engine)[shard]
    return tq.get_client().run(Operation, engine.request(Snapshot(""), 30.0), lambda reply: reply.value)


def kill_shard(stack: LocalStack, shard: int) -> None:
    os.kill(stack.processes[shard].pid, signal.SIGKILL)
    wait_until(stack.failure, "a controller is dead")
