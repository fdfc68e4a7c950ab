"""Recipe: a single controller that moves metadata, workers that move data.

The driver of a PPO step holds no tensors. It passes `KVBatchMeta`, keys and tags, from stage to stage; each worker gets
the columns it needs and writes its own beside them.
"""

# %% Workers
# Each stage is a worker group; here a pool of two processes for all of them. They find the queue by the environment.
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from tensordict import TensorDict

import transfer_queue as tq


def rollout(meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
    assert meta.partition_id
    prompts = tq.kv_batch_get_by_meta(meta, select_fields=["prompt"])["prompt"]
    responses = [torch.cat([prompt, prompt.flip(0)]) for prompt in prompts.unbind()]
    lengths = [{"total_lengths": len(response)} for response in responses]
    fields = TensorDict({"response": torch.nested.as_nested_tensor(responses, layout=torch.jagged)}, [len(responses)])
    return tq.kv_batch_put(meta.keys, meta.partition_id, fields, tags=lengths)


def reward(meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
    assert meta.partition_id
    responses = tq.kv_batch_get_by_meta(meta, select_fields=["response"])["response"]
    rewards = torch.tensor([float(response.float().mean()) for response in responses.unbind()])
    return tq.kv_batch_put(meta.keys, meta.partition_id, TensorDict({"reward": rewards}, [len(rewards)]))


def update(meta: tq.KVBatchMeta) -> float:
    batch = tq.kv_batch_get_by_meta(meta, select_fields=["response", "reward"])
    return float(batch["reward"].mean())


# %% The driver
# A step is: put prompts, three stages over chunks of the metadata, clear.
def main() -> None:
    tq.init()
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as workers:
        for step in range(2):
            prompts = [torch.arange(1, 2 + number % 3) for number in range(8)]
            keys = [f"step {step} prompt {number}" for number in range(8)]
            fields = TensorDict({"prompt": torch.nested.as_nested_tensor(prompts, layout=torch.jagged)}, [8])
            meta = tq.kv_batch_put(keys, "train", fields, tags=[{"step": step}] * 8)
            for stage in (rollout, reward):
                meta = tq.KVBatchMeta.concat(list(workers.map(stage, meta.chunk(2))))
            losses = list(workers.map(update, meta.chunk(2)))
            print(f"step {step}: {len(meta)} rows with {meta.fields}, mean reward {sum(losses) / 2:.2f}")
            tq.kv_clear(meta.keys, "train")
    assert tq.kv_list("train") == {"train": {}}
    tq.close()


if __name__ == "__main__":
    main()
