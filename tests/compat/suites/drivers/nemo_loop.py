"""NeMo-RL's data plane client in a driver and two Ray actors for 20 steps, on one backend: ``make compat CLIENT=nemo-rl
SNAPSHOT=path COMPAT_ARGS=nemo_loop.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
import torch
from nemo_rl.data_plane.column_io import kv_first_write, read_columns, write_columns
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

ROWS, STEPS = 8, 20
FIELDS = ["input_ids", "generation_logprobs", "input_lengths", "sample_mask", "total_reward"]


def settings(backend: str) -> dict[str, Any]:
    return {
        "enabled": True,
        "impl": "transfer_queue",
        "backend": backend,
        "storage_capacity": 1000,
        "num_storage_units": 2,
        "claim_meta_poll_interval_s": 0.05,
        "global_segment_size": 64 << 20,
        "local_buffer_size": 32 << 20,
    }


def made(step: int) -> BatchedDataDict[Any]:
    lengths = 2 + (torch.arange(ROWS) + step) % 4
    inside = torch.arange(5)[None] < lengths[:, None]
    ids = torch.where(inside, (10 * step + torch.arange(ROWS))[:, None], 0)
    return BatchedDataDict(
        input_ids=ids,
        generation_logprobs=-ids.float(),
        input_lengths=lengths,
        sample_mask=torch.ones(ROWS),
        total_reward=torch.arange(ROWS).float(),
    )


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, backend: str) -> None:
        self.client = build_data_plane_client(settings(backend), bootstrap=False)

    def rollout(self, step: int) -> Any:
        names = [f"{step}.{row}" for row in range(ROWS)]
        return kv_first_write(made(step), sample_ids=names, dp_client=self.client, partition_id="train")

    def log_probs(self, meta: Any) -> None:
        read = read_columns(self.client, meta, ["input_ids", "input_lengths"])
        write_columns(self.client, meta, {"prev_logprobs": read["input_ids"].float() / 2})


def main(backend: str) -> None:
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "PATH", "MC_STORE_MEMCPY") if name in os.environ}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    client = build_data_plane_client(settings(backend), bootstrap=True)
    tasks = ["reference", "train"]
    client.register_partition(
        partition_id="train", fields=[*FIELDS, "prev_logprobs"], num_samples=ROWS * STEPS, consumer_tasks=tasks
    )
    rollout, policy = (Worker.remote(backend) for _ in range(2))
    for step in range(STEPS):
        meta = ray.get(rollout.rollout.remote(step))
        claimed = client.claim_meta(
            partition_id="train", task_name="reference", required_fields=["input_ids"], batch_size=ROWS, timeout_s=60.0
        )
        assert sorted(claimed.sample_ids) == sorted(meta.sample_ids)
        ray.get(policy.log_probs.remote(meta))
        ready = client.claim_meta(
            partition_id="train", task_name="train", required_fields=["prev_logprobs"], batch_size=ROWS, timeout_s=60.0
        )
        assert sorted(ready.sample_ids) == sorted(meta.sample_ids)
        got, expected = read_columns(client, meta, [*FIELDS, "prev_logprobs"]), made(step)
        width = int(expected["input_lengths"].max())
        for name in FIELDS:
            value = expected[name][:, :width] if expected[name].ndim == 2 else expected[name]
            found = got[name][:, :width] if expected[name].ndim == 2 else got[name]
            assert torch.equal(found, value), (name, found, value)
        assert torch.equal(got["prev_logprobs"][:, :width], expected["input_ids"][:, :width].float() / 2)
        client.clear_samples(sample_ids=meta.sample_ids, partition_id="train")
    client.close()
    print(f"{STEPS} steps of {ROWS} rows came back as put, with {backend}")


if __name__ == "__main__":
    main(*sys.argv[1:])
