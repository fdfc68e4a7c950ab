"""verl's trainer, replay buffer, ``tqbridge`` and agent loop workers around a stub model: 20 steps in a Ray cluster.

After 10 steps a second trainer takes over: it loads the checkpoint of the first beside the living queue, starts the
unfinished prompts again and goes on. ``make compat CLIENT=verl SNAPSHOT=path``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.transferqueue_utils import tqbridge

import transfer_queue as tq

PROMPTS, ANSWERS, STEPS = 4, 2, 20


def settings(folder: str, steps: int) -> Any:
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    changed = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": PROMPTS},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": PROMPTS},
            "rollout": {"n": ANSWERS, "calculate_log_probs": True},
        },
        "trainer": {
            "default_local_dir": folder,
            "logger": ["console"],
            "save_freq": 5,
            "test_freq": -1,
            "val_before_train": False,
            "total_epochs": 1000,
            "total_training_steps": steps,
            "v1": {"trainer_mode": "colocate_async"},
        },
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}},
    }
    return OmegaConf.merge(config, OmegaConf.create(changed, flags={"allow_objects": True}))


class Rollout(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker; its model answers with the prompt's number, some answers longer than others."""

    def __init__(self, config: Any) -> None:
        self.config = config
        tq.init()
        self.background_tasks: set[Any] = set()

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **kwargs: Any) -> None:
        kwargs.pop("agent_name"), kwargs.pop("trace")
        number = int(kwargs["raw_prompt"][0]["content"])
        length = 2 + (number + kwargs["session_id"]) % 3
        await asyncio.sleep(0.01 * (number % 5))
        output = AgentLoopOutput(
            prompt_ids=[number] * 3,
            response_ids=[number + 1] * length,
            response_mask=[1] * length,
            response_logprobs=[-1.0] * length,
            reward_score=float(kwargs["session_id"]),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": 0, "max_global_steps": 0, "reward_extra_info": {}},
        )
        await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None:
        return None

    async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _compute_multi_modal_inputs(self, output: Any, input_ids: torch.Tensor) -> dict[str, Any]:
        return {}

    def _compute_position_ids(self, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.arange(input_ids.shape[1])[None]


class Manager(AgentLoopManagerTQ):
    def __init__(self, workers: list[Any]) -> None:
        self.agent_loop_workers = workers


class Actor:
    """A worker group of one rank."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}
        self.trained: list[set[int]] = []

    @tqbridge()
    def compute_log_prob(self, batch: TensorDict) -> TensorDict:
        rows = [-0.5 * torch.ones(len(row)) for row in batch["input_ids"].unbind()]
        column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": column, "entropy": column.clone()}, batch_size=len(rows))

    @tqbridge()
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        assert len(batch) == PROMPTS * ANSWERS
        numbers = set()
        for prompt, response, mask, old, advantage, whole in zip(
            *(batch[name].unbind() for name in ("prompts", "responses", "response_mask", "old_log_probs")),
            batch["advantages"].unbind(),
            batch["input_ids"].unbind(),
            strict=True,
        ):
            assert torch.equal(whole, torch.cat([prompt, response]))
            assert len(response) == len(mask) == len(old) == len(advantage)
            assert set(response.tolist()) == {int(prompt[0]) + 1}
            assert bool((old == -0.5).all())
            numbers.add(int(prompt[0]))
        means = [float(row.mean()) for row in batch["advantages"].unbind()]
        assert abs(sum(means)) < 1e-4, means
        assert len(numbers) == PROMPTS
        self.trained.append(numbers)
        return {"metrics": {"mfu": [0.0], "grad_norm": [1.0], "pg_loss": [0.1]}}

    def save_checkpoint(self, path: str, *args: Any, **kwargs: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, local_path: str, **kwargs: Any) -> None:
        assert Path(local_path).is_dir()


class Trainer(PPOTrainerColocateAsync):
    """verl's trainer without GPUs."""

    def _setup(self) -> None:
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        names = ("update_weights", "abort_replicas", "sleep_replicas", "resume_generation_replicas")
        self.checkpoint_manager = SimpleNamespace(**dict.fromkeys(names, nothing))
        self.distillation_config = None
        self.actor_rollout_wg = Actor()
        prompts = [
            {"raw_prompt": [{"role": "user", "content": str(n)}], "index": n, "agent_name": "stub"} for n in range(200)
        ]
        self.train_dataloader = StatefulDataLoader(prompts, batch_size=PROMPTS, collate_fn=collate_fn)
        self.train_dataloader_it = None
        self.steps_per_epoch = len(self.train_dataloader)
        self.total_training_steps = self.config.trainer.total_training_steps
        self._init_dump_executor()
        self._load_checkpoint()


def main() -> None:
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    with tempfile.TemporaryDirectory() as folder:
        config = settings(folder, STEPS // 2)
        tq.init(config.transfer_queue)
        workers = [ray.remote(Rollout).options(num_cpus=0).remote(config) for _ in range(2)]
        seen: list[set[int]] = []
        for steps in (STEPS // 2, STEPS):
            trainer = Trainer(settings(folder, steps))
            trainer.init()
            assert trainer.global_steps == steps - STEPS // 2
            trainer.fit(Manager(workers))
            assert len(trainer.actor_rollout_wg.trained) == STEPS // 2
            seen += trainer.actor_rollout_wg.trained
    numbers = [number for step in seen for number in step]
    assert len(numbers) == len(set(numbers)) == STEPS * PROMPTS, "a prompt was trained twice or lost"
    tq.close()
    print(f"{STEPS} steps, {len(numbers)} prompts, each once; resumed after {STEPS // 2}")


if __name__ == "__main__":
    main()
