"""UniRL's own ``TransferQueueRuntime`` and ``TQTransport`` in a driver and two Ray actors for 20 steps: ``make compat
CLIENT=unirl SNAPSHOT=path``."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from unirl.distributed.tensor.backend.transfer_queue import TQTransport, TransferQueueRuntime

STEPS = 20


def made(step: int) -> dict[str, Any]:
    base = torch.arange(4.0) + step
    return {
        "latents": base[:, None, None].repeat(1, 2, 3),
        "steps": torch.arange(7) + step,
        "half": base[:, None].repeat(1, 5).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True, step % 2 == 0]),
    }


@ray.remote(num_cpus=0)
class Worker:
    def init_transferqueue_client(self, handoff: Any, name: str = "worker") -> None:
        self.runtime = TransferQueueRuntime().install()
        self.runtime.create_client(f"{name}_{os.getpid()}", handoff)
        self.transport = TQTransport(self.runtime)

    def reset_zero_copy_buffer_free(self) -> None:
        self.runtime.reset_zero_copy_buffer_free()

    def rollout(self, step: int) -> Any:
        return self.transport.put_batch(made(step))

    def reward(self, metas: dict[str, Any]) -> Any:
        got = self.transport.get_batch({"latents": metas["latents"], "steps": metas["steps"]})
        return self.transport.put_batch({"reward": got["latents"].sum((1, 2)), "next": got["steps"] + 1})


def main() -> None:
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    runtime = TransferQueueRuntime().install()
    backend = "unirl.distributed.tensor.backend.transfer_queue.simple.SimpleBackend"
    group = {"transfer_queue": {"_target_": backend, "num_units": 2, "unit_size": 1024}}
    controller_handoff, actor_handoff = runtime.init(OmegaConf.create(group))
    workers = [Worker.remote() for _ in range(2)]
    runtime.init_remote_actor_clients(workers, actor_handoff)
    runtime.create_client("driver", controller_handoff, sync=True)
    transport = TQTransport(runtime)
    for step in range(STEPS):
        metas = ray.get(workers[0].rollout.remote(step))
        metas = {**metas, **ray.get(workers[1].reward.remote(metas))}
        expected = made(step)
        expected |= {"reward": expected["latents"].sum((1, 2)), "next": expected["steps"] + 1}
        alone = {name: transport.get_batch({name: meta})[name] for name, meta in metas.items()}
        for got in (alone, transport.get_batch(metas)):
            for name, value in expected.items():
                assert not got[name].is_nested
                assert got[name].dtype == value.dtype
                assert torch.equal(got[name].reshape(value.shape), value), name
        ref = transport.put(torch.arange(6.0).view(3, 2))
        assert torch.equal(transport.get([ref, ref]), torch.arange(6.0).view(3, 2).repeat(2, 1))
        runtime.reset_actors_zero_copy_buffer_free(workers)
        runtime.clear_partition()
    print(f"{STEPS} steps came back as put")


if __name__ == "__main__":
    main()
