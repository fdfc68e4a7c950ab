"""A data loader over rows that are still being produced."""

# %% A queue whose sampler knows ranks
# Processes that ask with the same `dp_rank` see identical batches, different ranks different rows.
import threading

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.dataloader import mark_end

tq.init({"controller": {"sampler": tq.RankAwareSampler()}})


# %% A producer
# It puts rows as they come and says when there will be no more. Usually it is another process.
def produce() -> None:
    for first in range(0, 24, 4):
        numbers = torch.arange(first, first + 4)
        tq.get_client().put(TensorDict({"x": numbers, "square": numbers**2}, [4]), partition_id="train")
    mark_end("train")


producer = threading.Thread(target=produce)
producer.start()

# %% The loader
# `batch_size` rows are fetched at a time and divided into micro-batches. The loader ends when the producer has marked
# the end and all rows were handed out; without a mark it waits for more.
dataset = tq.StreamingDataset(
    config=None,
    batch_size=8,
    micro_batch_size=4,
    data_fields=["x", "square"],
    partition_id="train",
    task_name="train",
    dp_rank=0,
)
loader = tq.StreamingDataLoader(dataset)
seen = []
for batch, meta in loader:
    assert torch.equal(batch["x"] ** 2, batch["square"])
    seen += batch["x"].tolist()
    tq.get_client().clear_samples(meta)
producer.join()
print(sorted(seen) == list(range(24)))  # True
tq.close()
