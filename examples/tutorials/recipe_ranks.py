"""Recipe: the ranks of a torchrun job share one queue and stream from it.

Rank 0 starts the queue; `init()` in the other ranks finds it by the store that `torchrun` brings. Each rank trains on
rows of its own, and gradients are averaged as always. On several machines start the queue first, with `tq up` or the
operator: a queue that `init()` starts is reached from its own machine only.
"""

# %% A rank
# Started as `torchrun --nproc-per-node 2 FILE`; without `torchrun` the script starts that by itself.
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.parallel import DistributedDataParallel

import transfer_queue as tq
from transfer_queue.dataloader import mark_end

ROWS = 64
BATCH = 8


def produce() -> None:
    """Rows of a line that the model is to find; a job has rollout workers for this."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROWS // BATCH):
        x = torch.rand(BATCH, 1, generator=generator)
        tq.get_client().put(TensorDict({"x": x, "y": 3 * x - 1}, [BATCH]), partition_id="train")
    mark_end("train", "rank 0", producers=1)


def train(rank: int, ranks: int) -> None:
    dist.init_process_group("gloo")
    tq.init({"layout": "dense", "controller": {"sampler": tq.RankAwareSampler()}})
    if rank == 0:
        produce()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dataset = tq.StreamingDataset(None, BATCH, BATCH, ["x", "y"], "train", "train", rank, total_samples=ROWS // ranks)
    rows = 0
    for batch, meta in tq.StreamingDataLoader(dataset):
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()  # averages the gradients of all ranks
        optimizer.step()
        rows += len(meta)
    print(f"rank {rank} trained on {rows} rows", flush=True)
    dist.barrier()  # rank 0 ends the queue
    tq.close()
    dist.destroy_process_group()


# %% The job
def main() -> None:
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__], check=True)
    print("each row was seen by one rank")  # each row was seen by one rank


if __name__ == "__main__":
    main()
