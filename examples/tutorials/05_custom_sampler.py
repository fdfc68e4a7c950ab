"""Your own sampler: decide which ready rows a fetch gets."""

# %% The class
# A sampler is a class with one method. It gets the ready rows as a plain list and returns two lists: the rows of the
# batch, and those that the task shall not get again. The one of this tutorial is in `longest_first.py`:
#
# EMBED longest_first.py
#
# %% Use it
# `init()` takes the class or an instance; on a cluster the resource names the sampler. It is made again in the
# controller, so its module must be importable and its arguments kept as attributes. Wrong arguments are refused here,
# before anything starts.
import torch
from longest_first import LongestFirst
from tensordict import TensorDict

import transfer_queue as tq

tq.init({"controller": {"sampler": LongestFirst(least=2)}})
client = tq.get_client()
lengths = [3, 9, 1, 4, 7]
tq.kv_batch_put(
    [f"row {n}" for n in range(5)],
    "p",
    TensorDict({"x": torch.tensor(lengths)}, [5]),
    tags=[{"length": n} for n in lengths],
)

# %% Parameters of a fetch
# What a fetch gives as `sampling_config` reaches the sampler as keyword arguments.
peeked = client.get_meta(["x"], 2, "p", task_name="train", sampling_config={"peek": True})
print(client.get_data(peeked)["x"].tolist())  # [9, 7]
taken = client.get_meta(["x"], 3, "p", task_name="train")
print(client.get_data(taken)["x"].tolist())  # [9, 7, 4]

# %% When it refuses
# Too few rows: the fetch waits, and its error says so. What a sampler raises reaches the one who asked and nobody else.
try:
    client.get_meta(["x"], 2, "p", task_name="train", timeout=0.1)
except TimeoutError as error:
    print(str(error).split(";")[0])
tq.close()

# %% The built-in ones
# Groups of a prompt, data-parallel ranks, equal lengths, token budgets, priorities with an off-policy window, and
# replay: see [samplers](../samplers.md). Micro-batches of at most 10 tokens, for example:
tq.init({"controller": {"sampler": tq.TokenBudgetSampler(token_budget=10)}})
client = tq.get_client()
tags = [{"total_lengths": n} for n in lengths]
tq.kv_batch_put([f"row {n}" for n in range(5)], "p", TensorDict({"x": torch.tensor(lengths)}, [5]), tags=tags)
for _ in range(3):
    micro = client.get_meta(["x"], 8, "p", task_name="train", sampling_config={"flush": True})
    print(client.get_data(micro)["x"].tolist())  # [3] | [9, 1] | [4]
tq.close()
