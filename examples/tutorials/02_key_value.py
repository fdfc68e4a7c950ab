"""Rows by key: upserts, tags, columns, and listing."""

# %% Put by key
# A key names a row of a partition. `kv_put` takes a dict for one row, `kv_batch_put` a `TensorDict` for many.
import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init()
tq.kv_put("greeting", "chat", {"tokens": torch.tensor([3, 1, 4]), "text": "hello"}, tag={"turn": 0})

keys = [f"prompt {number}" for number in range(4)]
meta = tq.kv_batch_put(keys, "chat", TensorDict({"score": torch.zeros(4)}, [4]), tags=[{"turn": n} for n in range(4)])
print(meta.fields)  # ['score']  (ready on all of these keys)

# %% Get
# Rows come in the order of the keys, again where keys repeat. Without `select_fields` you get the fields that all have.
row = tq.kv_batch_get("greeting", "chat")
print(list(row["text"]), row["tokens"][0].tolist())  # ['hello'] [3, 1, 4]
assert tq.kv_batch_get(["prompt 2", "prompt 0", "prompt 2"], "chat", select_fields="score").batch_size == (3,)

# %% Upsert
# A put to an existing key overwrites the fields it names, adds new ones, and leaves the others. Tags are merged.
tq.kv_batch_put(keys[:2], "chat", TensorDict({"score": torch.tensor([0.5, 1.0])}, [2]), tags=[{"done": True}] * 2)
print(tq.kv_batch_get(keys, "chat", select_fields=["score"])["score"].tolist())  # [0.5, 1.0, 0.0, 0.0]

# %% Tags alone
# Tags live in the controller: small, plain values to steer by, read without touching data.
tq.kv_put("run", "status", tag={"phase": "warm-up"})
tq.kv_put("run", "status", tag={"step": 12})
print(tq.kv_list("status"))  # {'status': {'run': {'phase': 'warm-up', 'step': 12}}}
print([key for key, tag in tq.kv_list("chat")["chat"].items() if tag.get("done")])  # ['prompt 0', 'prompt 1']

# %% What goes wrong says so
# A key that is missing is an error that names it. It never makes the answer shorter. A field that rows lack is an error
# too.
try:
    tq.kv_batch_get(["prompt 1", "promt 2"], "chat")
except ValueError as error:
    print(error)  # keys ['promt 2'] not found in partition 'chat'

# %% Clear
tq.kv_clear([*keys, "was never there"], "chat")
print(list(tq.kv_list("chat")["chat"]))  # ['greeting']
tq.close()
