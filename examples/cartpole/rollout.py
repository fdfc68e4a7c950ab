"""A rollout worker: plays groups of episodes with the newest weights and puts each episode as it finishes.

It learns from its environment where the queue is (``TQ_CONFIG_FILE`` or ``TQ_CONTROLLER_ADDRESS``): on a cluster the
operator injects that, on one machine ``tq up`` sets it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence

import tensordict  # noqa: F401  loaded now, not within the first get
import torch
from policy import GROUP_SIZE, Policy, Trajectory, play_group
from stages import Stages

import transfer_queue as tq

_POLL_S = 0.01


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=int, default=int(os.environ.get("JOB_COMPLETION_INDEX", "0")))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        run(arguments.worker, arguments.seed)
    except tq.TransferQueueError as error:
        sys.exit(f"rollout worker {arguments.worker}: {error}")


def run(worker: int, seed: int) -> None:
    torch.set_num_threads(1)
    tq.init()
    tq.kv_put(key="policy", partition_id="weights", tag={})  # the row to which the trainer writes
    policy = Policy()
    stages = Stages()
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    for group in itertools.count():
        # GRPO is on-policy: group n is played with the weights of update n or later.
        if not load_weights(policy, group, stages):
            break
        first_state = 1_000_000 * seed + 1000 * group + worker
        keys = [f"worker{worker}/group{group}/episode{member}" for member in range(GROUP_SIZE)]
        with stages.time("register group"):
            # Rows of their own for the whole group before the first episode ends: a group is consecutive rows.
            tq.kv_batch_put(keys=keys, partition_id="rollouts", tags=[{"group": group, "worker": worker}] * GROUP_SIZE)
        with stages.time("play") as playing:
            for episode in play_group(policy, first_state, generator):
                before = stages["put episode"].seconds if "put episode" in stages else 0.0
                put(keys[episode.member], episode, stages)
                playing.seconds -= stages["put episode"].seconds - before
    # One row for all workers: tags of later puts are merged into it.
    tq.kv_put(key="stages", partition_id="reports", tag={f"worker{worker}": stages.as_dict()})
    tq.close()


def put(key: str, episode: Trajectory, stages: Stages) -> None:
    fields: dict[str, torch.Tensor | str] = {
        "observations": episode.observations,
        "actions": episode.actions,
        "logprobs": episode.logprobs,
        "rewards": episode.rewards,
        "return": torch.tensor(episode.total_reward),
        "ending": episode.ending,
    }
    nbytes = sum(value.nbytes if isinstance(value, torch.Tensor) else len(value) for value in fields.values())
    with stages.time("put episode", nbytes):
        tq.kv_put(key=key, partition_id="rollouts", fields=fields)


def load_weights(policy: Policy, version: int, stages: Stages) -> bool:
    """Wait for weights of at least ``version`` and load the newest; False once training is done."""
    with stages.time("wait for weights"):
        while True:
            tag = tq.kv_list("weights")["weights"]["policy"]
            if tag.get("done"):
                return False
            if tag.get("version", -1) >= version:
                break
            time.sleep(_POLL_S)
    with stages.time("get weights") as stage:
        flat = tq.kv_batch_get("policy", "weights", select_fields=["flat"])["flat"][0]
        stage.nbytes += flat.nbytes
    policy.load_flat_weights(flat)
    return True


if __name__ == "__main__":
    main()
