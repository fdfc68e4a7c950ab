"""Rollout Job of the end-to-end test: plays CartPole groups and tags every episode with the digest of its bytes.

Where the queue is comes from the environment alone; the pod carries only the injection label.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys

import torch

sys.path.insert(0, "/opt/transferqueue/examples/cartpole")
from policy import GROUP_SIZE, Policy, Trajectory, play_group

import transfer_queue as tq

FIELDS = ("observations", "actions", "logprobs", "rewards")


def digest(episode: Trajectory) -> str:
    """SHA-256 over the bytes of every field of the episode."""
    total = hashlib.sha256()
    for name in FIELDS:
        total.update(getattr(episode, name).contiguous().numpy().tobytes())
    total.update(episode.ending.encode())
    return total.hexdigest()


def main() -> None:
    worker, groups = int(os.environ.get("JOB_COMPLETION_INDEX", "0")), int(sys.argv[1])
    torch.set_num_threads(1)
    tq.init()
    generator = torch.Generator().manual_seed(worker)
    policy = Policy()
    for group in range(groups):
        keys = [f"worker{worker}/group{group}/episode{member}" for member in range(GROUP_SIZE)]
        tq.kv_batch_put(keys=keys, partition_id="rollouts", tags=[{"host": socket.gethostname()}] * GROUP_SIZE)
        for episode in play_group(policy, 1000 * group + worker, generator):
            fields = {name: getattr(episode, name) for name in FIELDS} | {"ending": episode.ending}
            tag = {"sha256": digest(episode)}
            tq.kv_put(key=keys[episode.member], partition_id="rollouts", fields=fields, tag=tag)
    tq.close()
    print(f"worker {worker}: put {groups * GROUP_SIZE} episodes from {socket.gethostname()}")


if __name__ == "__main__":
    main()
