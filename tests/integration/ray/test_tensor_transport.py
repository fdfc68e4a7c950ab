"""``_tensor_transport="transferqueue"``: tensors of Ray's objects as blocks of the process that puts them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
import torch
from ray.experimental import set_target_for_ref

from tests.integration.ray.cluster import RayCluster
from tests.waiting import wait_until
from transfer_queue.client.io import shared_io
from transfer_queue.errors import ConnectionLostError, InvalidInputError
from transfer_queue.ray import TRANSPORT, register_tensor_transport
from transfer_queue.ray.transport import exchange

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("driver")]


def samples() -> dict[str, torch.Tensor]:
    return {
        "large": torch.arange(300_000, dtype=torch.float32).reshape(300, 1000),
        "bfloat16": torch.arange(7, dtype=torch.bfloat16),
        "bool": torch.tensor([[True, False], [False, False]]),
        "complex": torch.tensor([1 + 2j, -3j]),
        "float8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(41),
        "no elements": torch.empty(3, 0, 2, dtype=torch.int16),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "strided": torch.arange(20)[3::4],
        "requires grad": torch.ones(3, requires_grad=True),
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }


def differing(found: dict[str, torch.Tensor]) -> list[str]:
    """Names of the samples that are not as they were."""
    return [
        name
        for name, sample in samples().items()
        if found[name].dtype is not sample.dtype
        or found[name].shape != sample.shape
        or found[name].tolist() != sample.tolist()
    ]


class _Holder:
    def put(self, value: Any) -> list[Any]:
        return [ray.put(value, _tensor_transport=TRANSPORT)]

    def put_samples(self) -> list[Any]:
        return self.put({**samples(), "no tensor": "text"})

    @ray.method(tensor_transport=TRANSPORT)
    def made(self, count: int) -> list[Any]:
        return [torch.full((count,), 7), "text"]

    def differing(self, references: list[Any]) -> list[str]:
        return differing(ray.get(references[0]))

    def total(self, value: list[Any]) -> int:
        return int(value[0].sum())

    def read_over_tcp(self, references: list[Any]) -> list[str]:
        exchange()._backend._use_shared_memory = False
        return self.differing(references)

    def usage(self) -> tuple[int, int]:
        return exchange().usage()

    def pid(self) -> int:
        return os.getpid()


Holder: Any = ray.remote(num_cpus=0, enable_tensor_transport=True)(_Holder)


@ray.remote(num_cpus=0)
class Plain:
    def put(self) -> list[Any]:
        register_tensor_transport()
        return [ray.put(torch.zeros(1), _tensor_transport=TRANSPORT)]


@ray.remote(num_cpus=0)
def differing_in_task(references: list[Any]) -> list[str]:
    return differing(ray.get(references[0]))


@ray.remote(num_cpus=0)
def put_in_task() -> list[Any]:
    register_tensor_transport()
    return [ray.put(samples(), _tensor_transport=TRANSPORT)]


def usage(actor: Any) -> tuple[int, int]:
    return tuple(ray.get(actor.usage.remote(), timeout=60))


def test_tensors_of_all_kinds_pass_between_actors_tasks_and_the_driver_and_are_freed(driver: RayCluster) -> None:
    writer, reader = Holder.remote(), Holder.remote()
    own = ray.put(samples(), _tensor_transport=TRANSPORT)
    references = {
        "actor": ray.get(writer.put_samples.remote(), timeout=120),
        "driver": [own],
        "task": ray.get(put_in_task.remote(), timeout=120),
    }
    for put_by, reference in references.items():
        readings = [
            differing(ray.get(reference[0])),
            ray.get(reader.differing.remote(reference), timeout=60),
            ray.get(reader.read_over_tcp.remote(reference), timeout=60),
            ray.get(differing_in_task.remote(reference), timeout=120),
        ]
        assert readings == [[], [], [], []], put_by
    assert ray.get(references["actor"][0])["no tensor"] == "text"
    assert usage(writer)[1] == exchange().usage()[1] == 1
    del references, reference, own
    wait_until(lambda: usage(writer) == (0, 0) and exchange().usage() == (0, 0), "the blocks are freed")


def test_results_of_methods_go_to_other_actors_and_outlive_no_reference(driver: RayCluster) -> None:
    writer, reader = Holder.remote(), Holder.remote()
    made = writer.made.remote(100_000)
    put = ray.get(writer.put_samples.remote(), timeout=120)
    assert ray.get(reader.total.remote(made), timeout=120) == 700_000
    target = torch.zeros(100_000, dtype=torch.int64)
    set_target_for_ref(made, [target])
    received, text = ray.get(made)
    assert (received.data_ptr(), int(target.sum()), text) == (target.data_ptr(), 700_000, "text")
    ray.kill(writer)
    with pytest.raises(ConnectionLostError, match="the process that put them has ended"):
        wait_until(lambda: ray.get(made) is None, "the writer is gone")
    with pytest.raises((ray.exceptions.RayError, ConnectionLostError)):
        ray.get(put[0], timeout=60)


def test_a_thousand_references_are_freed_and_a_killed_reader_keeps_nothing(driver: RayCluster) -> None:
    reader = Holder.remote()
    large = ray.put({**samples()}, _tensor_transport=TRANSPORT)
    assert ray.get(reader.differing.remote([large]), timeout=120) == []
    os.kill(ray.get(reader.pid.remote()), signal.SIGKILL)
    many = [ray.put(torch.full((number,), number), _tensor_transport=TRANSPORT) for number in range(1000)]
    assert [int(ray.get(many[number]).sum()) for number in (0, 1, 999)] == [0, 1, 999 * 999]
    assert exchange().usage()[1] == 1001
    del many, large
    wait_until(lambda: exchange().usage() == (0, 0), "the blocks are freed")


def test_what_cannot_be_put_is_refused_with_its_cause(driver: RayCluster) -> None:
    small = Holder.options(runtime_env={"env_vars": {"TQ_RAY_CAPACITY": "1Mi"}}).remote()
    with pytest.raises(Exception, match=r"no room for \d+ bytes of tensors.*set TQ_RAY_CAPACITY to more"):
        ray.get(small.put.remote(torch.zeros(2 << 20, dtype=torch.uint8)), timeout=120)
    assert usage(small) == (0, 0)
    with pytest.raises(Exception, match=r"define it with @ray\.remote\(enable_tensor_transport=True\)"):
        ray.get(Plain.remote().put.remote(), timeout=120)
    with pytest.raises(InvalidInputError, match=r"tensor 1 of the object: torch.sparse_coo tensors cannot be stored"):
        ray.put([torch.zeros(1), torch.eye(2).to_sparse()], _tensor_transport=TRANSPORT)


def test_a_put_from_the_copy_thread_of_a_client_does_not_wait_for_itself(driver: RayCluster) -> None:
    large = torch.ones(1 << 20)

    async def put() -> Any:
        return await shared_io().run_copy(lambda: ray.put(large, _tensor_transport=TRANSPORT))

    assert int(ray.get(shared_io().wait(put(), 60)).sum()) == 1 << 20
