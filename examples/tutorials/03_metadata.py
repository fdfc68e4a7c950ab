"""Metadata: batches that can be divided, joined and sent around without their data."""

# %% What it holds
# `BatchMeta` says which rows, in which partitions, with which fields. It is small and picklable: a driver process
# can hand parts of it to workers, which get the data themselves.
import pickle

import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init()
client = tq.get_client()
client.put(TensorDict({"x": torch.arange(8), "y": torch.rand(8, 3)}, [8]), partition_id="p")
meta = client.get_meta(["x", "y"], batch_size=8, partition_id="p", task_name="work")
print(meta.size, meta.field_names, meta.is_ready)  # 8 ['x', 'y'] True

# %% Divide it among workers
# Chunks are nearly equal; each worker reads only its rows and the fields it selects.
parts = pickle.loads(pickle.dumps(meta.chunk(3)))
print([len(part) for part in parts])  # [3, 3, 2]
print(client.get_data(parts[1].select_fields(["x"]))["x"].tolist())  # [3, 4, 5]

# %% Choose and order rows
odd = meta.select_samples([1, 3, 5, 7])
odd.reorder([3, 2, 1, 0])
print(client.get_data(odd.select_fields(["x"]))["x"].tolist())  # [7, 5, 3, 1]

# %% Join
# `concat` puts rows one after the other, `union` puts columns of the same rows side by side. A put with metadata adds
# the fields that it writes to that metadata and returns it.
assert tq.BatchMeta.concat(parts).global_indexes == meta.global_indexes
added = client.put(TensorDict({"z": torch.ones(8)}, [8]), metadata=meta.select_fields([]))
print(meta.union(added).field_names)  # ['x', 'y', 'z']

# %% Tags and notes
# Tags of rows are `custom_meta` here and reach the controller by `set_custom_meta`; `extra_info` belongs to the batch.
meta.update_custom_meta([{"length": number} for number in range(8)])
client.set_custom_meta(meta)
again = client.get_meta(["z"], batch_size=2, partition_id="p", task_name="other")
print(again.custom_meta)  # [{'length': 0}, {'length': 1}]
meta.set_extra_info("temperature", 0.7)
print(meta.chunk(2)[0].get_extra_info("temperature"))  # 0.7
tq.close()
