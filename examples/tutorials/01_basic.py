"""A queue on this machine: put rows, take them once per task, clear them."""

# %% Start a queue
# `init()` attaches to the queue that the environment names (`TQ_CONFIG_FILE`, `TQ_CONTROLLER_ADDRESS`). Where there is
# none, it starts a small one as processes of this machine, which end with this program.
import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init()
client = tq.get_client()

# %% Put rows
# A batch is a `TensorDict`: every field has one entry a row, the first axis. Fields may be tensors of equal shape,
# jagged tensors, or values such as strings. `put` appends the rows to a partition and returns what describes them.
rows = [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9, 1])]
prompts = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
written = client.put(TensorDict({"prompt": prompts, "id": torch.arange(3)}, [3]), partition_id="train")
assert len(written) == 3

# %% Take them
# A fetch names the task and the fields it needs. It gets rows on which all of them are ready, each row once a task.
# What it gets is metadata: the data moves when you ask for it.
meta = client.get_meta(["prompt"], batch_size=2, partition_id="train", task_name="generate")
batch = client.get_data(meta)
print([row.tolist() for row in batch["prompt"].unbind()])  # [[5, 6], [7]]

# %% Write further fields to the same rows
# The next stage of the job adds its columns. Tasks that wait for them continue.
client.put(TensorDict({"response": torch.tensor([[1.0], [2.0]])}, [2]), metadata=meta)
scored = client.get_meta(["prompt", "response"], batch_size=2, partition_id="train", task_name="score")
print(scored.field_names, scored.global_indexes == meta.global_indexes)  # ['prompt', 'response'] True

# %% Wait for what is not there yet
# A fetch waits for rows, five seconds unless you say otherwise, and then says what was missing.
try:
    client.get_meta(["response"], batch_size=3, partition_id="train", task_name="train", timeout=0.1)
except TimeoutError as error:
    print(error)  # ... 'response' is missing on 1 of 3

# %% Clear
# Rows stay until they are cleared; then their storage is free again.
client.clear_samples(meta)
client.clear_partition("train")
print(client.get_partition_list())  # []
tq.close()
