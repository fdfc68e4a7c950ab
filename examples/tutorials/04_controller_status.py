"""What the controller knows: production, consumption, and taking a task back to the start."""

# %% Rows that are produced in stages
import tempfile

import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init()
client = tq.get_client()
rows = client.put(TensorDict({"prompt": torch.arange(4)}, [4]), partition_id="step 1")
client.put(TensorDict({"response": torch.arange(2)}, [2]), metadata=rows.select_samples([0, 2]))

# %% Production
# One column a field, in the order in which fields were first written: 1 where it is ready.
indexes, produced = client.get_production_status(["prompt", "response"], "step 1")
assert produced is not None  # None: there is no such partition or field
print(produced.tolist())  # [[1, 1], [1, 0], [1, 1], [1, 0]]
print(client.check_production_status(["prompt"], "step 1"))  # True  (on all rows)

# %% Consumption
# Each task counts for itself.
client.get_meta(["prompt", "response"], batch_size=2, partition_id="step 1", task_name="train")
indexes, consumed = client.get_consumption_status("train", "step 1")
assert consumed is not None
print(consumed.tolist())  # [1, 0, 1, 0]
print(client.check_consumption_status("evaluate", "step 1"))  # False

# %% Every row, in any state
every = client.get_meta(["response"], batch_size=1, partition_id="step 1", mode="force_fetch")
print(every.production_status.tolist())  # [1, 0, 1, 0]

# %% Again from the start
client.reset_consumption("step 1", "train")
indexes, consumed = client.get_consumption_status("train", "step 1")
assert consumed is not None
print(consumed.tolist())  # [0, 0, 0, 0]

# %% Save all of it
# A checkpoint is the whole queue at one moment, taken while others go on; it loads into a queue of another size.
with tempfile.TemporaryDirectory() as folder:
    tq.save_checkpoint(folder, metadata={"step": 1})
    client.clear_partition("step 1")
    tq.load_checkpoint(folder)
indexes, produced = client.get_production_status(["response"], "step 1")
assert produced is not None
print(produced.flatten().tolist())  # [1, 0, 1, 0]
tq.close()
