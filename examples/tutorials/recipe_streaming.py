"""Recipe: disaggregated stages that stream.

Rollout workers, a reference model and a trainer are processes of their own that know nothing of each other. Each takes
rows as soon as the columns it needs are ready; nobody waits for a whole batch of another stage.
"""

# %% The stages
import multiprocessing

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.dataloader import mark_end

ROWS = 64
WORKERS = 2


def rollout(worker: int) -> None:
    tq.init()  # attaches to the queue that the environment names
    generator = torch.Generator().manual_seed(worker)
    for _ in range(ROWS // WORKERS // 4):
        lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
        tokens = [torch.randint(0, 100, (length,), generator=generator) for length in lengths]
        data = TensorDict({"tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged)}, [4])
        tq.get_client().put(data, partition_id="stream")
    mark_end("stream", f"rollout {worker}", producers=WORKERS)


def stream(task: str, fields: list[str], rank: int = 0) -> tq.StreamingDataLoader:
    dataset = tq.StreamingDataset(None, 8, 8, fields, "stream", task, rank)
    return tq.StreamingDataLoader(dataset)


def reference() -> None:
    tq.init()
    for batch, meta in stream("reference", ["tokens"]):
        scores = torch.tensor([float(row.float().mean()) for row in batch["tokens"].unbind()])
        tq.get_client().put(TensorDict({"reference": scores}, [len(scores)]), metadata=meta)


def train() -> None:
    tq.init()
    rows = updates = 0
    for batch, meta in stream("train", ["tokens", "reference"]):
        expected = torch.tensor([float(row.float().mean()) for row in batch["tokens"].unbind()])
        assert torch.equal(batch["reference"], expected)
        rows, updates = rows + len(meta), updates + 1
    print(f"trained on {rows} rows in {updates} micro-batches")
    assert rows == ROWS


# %% The job
# On a cluster these are pods; the queue reaches them by the environment there too.
def main() -> None:
    tq.init({"controller": {"sampler": tq.RankAwareSampler()}})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict"])
    stages = [context.Process(target=rollout, args=(worker,), daemon=True) for worker in range(WORKERS)]
    stages += [context.Process(target=stage, daemon=True) for stage in (reference, train)]
    for stage in stages:
        stage.start()
    for stage in stages:  # in the order in which they end
        stage.join()
        assert stage.exitcode == 0
    tq.close()


if __name__ == "__main__":
    main()
