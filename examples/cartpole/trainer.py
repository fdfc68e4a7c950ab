"""The trainer: takes whole groups from the queue, improves the policy, publishes its weights through the same queue.

Ends with exit code 0 once the mean return of the last 20 episodes has reached the goal, with 1 if that takes too long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch
from policy import GROUP_SIZE, Learner, Policy, group_advantages
from report import Curve, print_table
from stages import Stages
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq

FIELDS = ["observations", "actions", "logprobs", "rewards", "return", "ending"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3, help="rollout workers; each update takes one group of each")
    parser.add_argument("--goal", type=float, default=400.0, help="mean return of the last 20 episodes")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which training gives up")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        reached = Trainer(arguments.workers, arguments.seed).run(arguments.goal, arguments.limit)
    except tq.TransferQueueError as error:
        sys.exit(f"trainer: {error}")
    if not reached:
        sys.exit(f"trainer: the mean return did not reach {arguments.goal:g} within {arguments.limit:g} s")


class Trainer:
    def __init__(self, workers: int, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.workers = workers
        self.policy = Policy()
        self.learner = Learner(self.policy)
        self.stages = Stages()
        self.version = 0
        self.deadline = 0.0
        tq.init()
        self.client = tq.get_client()

    def run(self, goal: float, limit_s: float) -> bool:
        """Train until the goal or the limit; True if the goal was reached."""
        began = time.monotonic()
        self.deadline = began + limit_s
        self.publish()
        curve = Curve(goal)
        last: deque[float] = deque(maxlen=20)
        mean = 0.0
        while mean < goal and time.monotonic() < self.deadline:
            returns = self.step()
            last.extend(returns)
            mean = sum(last) / len(last)
            curve.add(self.version, len(returns), mean, time.monotonic() - began, finished=mean >= goal)
        elapsed = time.monotonic() - began
        self.publish(done=True)
        print_table(self.stages, self.rollout_reports(), curve.episodes, elapsed)
        tq.close()
        return mean >= goal

    def step(self) -> list[float]:
        """One update on one group of each worker. The returns of its episodes."""
        meta = self.wait_for_groups()
        with self.stages.time("get batch") as stage:
            batch = self.client.get_data(meta)
            stage.nbytes += _nbytes(batch)
        with self.stages.time("update"):
            returns = batch["return"]
            advantages = group_advantages(returns).repeat_interleave(returns.long())  # a reward of 1 a step
            observations, actions, logprobs = (_steps(batch[name]) for name in ("observations", "actions", "logprobs"))
            self.learner.update(observations, actions, logprobs, advantages)
        self.version += 1
        self.publish()
        with self.stages.time("clear"):
            self.client.clear_samples(meta)
        numbers: list[float] = returns.tolist()
        return numbers

    def wait_for_groups(self) -> tq.BatchMeta:
        """One complete group of each worker, taken for this task."""
        with self.stages.time("wait for groups"):
            while True:
                try:
                    return self.client.get_meta(
                        data_fields=FIELDS,
                        batch_size=self.workers * GROUP_SIZE,
                        partition_id="rollouts",
                        mode="fetch",
                        task_name="train",
                    )
                except TimeoutError:  # says what is missing; the workers may be starting
                    if time.monotonic() > self.deadline:
                        raise

    def publish(self, *, done: bool = False) -> None:
        """Put the weights where the rollout workers look; the tag tells them how new these are."""
        flat = self.policy.flat_weights()
        with self.stages.time("publish weights", flat.nbytes):
            tag = {"version": self.version, "done": done}
            tq.kv_put(key="policy", partition_id="weights", fields={"flat": flat}, tag=tag)

    def rollout_reports(self) -> list[dict[str, dict[str, float]]]:
        """What the rollout workers say about their time; those that do not answer within 10 s are left out."""
        deadline = time.monotonic() + 10
        tq.kv_put(key="stages", partition_id="reports", tag={})  # the row to which each worker adds its report
        while True:
            reports = list(tq.kv_list("reports")["reports"]["stages"].values())
            if len(reports) >= self.workers or time.monotonic() > deadline:
                return reports
            time.sleep(0.02)


def _steps(column: Tensor) -> Tensor:
    """The rows of a column one after the other: (episodes, steps, …) -> (all steps, …)."""
    return column.values() if column.is_nested else column.flatten(0, 1)


def _nbytes(batch: TensorDict) -> int:
    tensors = [column for column in batch.values() if isinstance(column, Tensor)]
    return sum(_steps(column).nbytes if column.is_nested else column.nbytes for column in tensors)


if __name__ == "__main__":
    main()
