"""ROLL's own ``transfer_backend`` and ``DataProto`` in a driver and two Ray actors for 20 steps: ``make compat
CLIENT=roll SNAPSHOT=path``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import torch
from roll.configs.base_config import TransferBackendArguments
from roll.distributed.scheduler import transfer_backend
from roll.distributed.scheduler.protocol import DataProto

ROWS, STEPS = 6, 20


def made(step: int) -> Any:
    numbers = torch.arange(ROWS) + 10 * step
    return DataProto.from_dict(
        tensors={
            "input_ids": numbers[:, None].repeat(1, 8),
            "scores": numbers.float() / 2,
            "mask": torch.ones(ROWS, 8, dtype=torch.bool),
            "half": numbers[:, None].repeat(1, 3).to(torch.bfloat16),
        },
        non_tensors={
            "text": np.array([f"row {number}" for number in numbers.tolist()], dtype=object),
            "info": np.array([{"row": number, "list": [1, 2]} for number in numbers.tolist()], dtype=object),
        },
        meta_info={"step": step},
    )


@ray.remote(num_cpus=0)
class Worker:
    def rollout(self, step: int) -> Any:
        return DataProto.to_remote(made(step), partition=f"step_{step}")

    def log_probs(self, data: Any) -> Any:
        found = DataProto.from_dict(tensors={"log_probs": -data.batch["input_ids"].float()})
        return DataProto.to_remote(found, ref_data=data, partition=f"step_{data.meta_info['step']}")


def main() -> None:
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "TQ_LAYOUT") if name in os.environ}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        namespace="roll",
        runtime_env={"env_vars": environment},
    )
    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}
    transfer_backend.init_transfer_backend(
        TransferBackendArguments(backend_name="TransferQueue", backend_config={"backend": storage})
    )
    rollout, scorer = Worker.remote(), Worker.remote()
    for step in range(STEPS):
        data = ray.get(rollout.rollout.remote(step))
        data = data.union(ray.get(scorer.log_probs.remote(data)))
        order = [5, 3, 1, 0, 2, 4] if step % 2 else list(range(ROWS))
        parts = data[torch.tensor(order)].chunk(2)
        assert [len(part) for part in parts] == [3, 3]
        both, expected = DataProto.concat(parts), made(step)
        for name in ("input_ids", "scores", "mask", "half"):
            assert not both[name].is_nested
            assert torch.equal(both[name], expected[name][torch.tensor(order)]), name
        assert torch.equal(both["log_probs"], -both["input_ids"].float())
        for name in ("text", "info"):
            assert list(both[name]) == [expected[name][row] for row in order], name
        assert torch.equal(both.repeat(2)["scores"], both["scores"].repeat_interleave(2))
        rows = both._remote_batch.row_ids()
        both._remote_batch.drop()
        try:
            transfer_backend.get(f"step_{step}", rows, ["scores"])
        except (RuntimeError, KeyError, ValueError):
            continue
        raise AssertionError("dropped rows are still there")
    print(f"{STEPS} steps of {ROWS} rows came back as put")


if __name__ == "__main__":
    main()
