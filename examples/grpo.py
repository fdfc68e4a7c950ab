"""A GRPO loop: two rollout processes, a reward process and a trainer share one queue. Run: python examples/grpo.py"""

import multiprocessing

import torch
from tensordict import TensorDict

import transfer_queue as tq

GROUP, PROMPTS, STEPS = 4, 8, 3  # answers to a prompt, prompts of a step


def rollout(worker: int) -> None:
    for step in range(STEPS):
        for prompt in range(worker, PROMPTS, 2):
            answers = torch.randint(100, (GROUP, 16))  # here your inference engine samples
            keys = [f"{prompt}.{number}" for number in range(GROUP)]
            tq.kv_batch_put(keys, f"step_{step}", fields=TensorDict({"answer": answers}, [GROUP]))


def reward() -> None:
    tq.init()  # finds the queue of the process that started this one
    client = tq.get_client()
    for batch in range(STEPS * PROMPTS):  # rows as they come, from either worker
        meta = client.get_meta(["answer"], GROUP, f"step_{batch // PROMPTS}", task_name="reward", timeout=60)
        answers = client.get_data(meta, layout="dense")["answer"]
        client.put(TensorDict({"reward": answers.float().mean(1)}, [GROUP]), metadata=meta)  # here your reward model


if __name__ == "__main__":
    tq.init({"controller": {"sampler": {"name": "GRPOGroupNSampler", "args": {"n_samples_per_prompt": GROUP}}}})
    start = multiprocessing.get_context("spawn").Process
    workers = [start(target=rollout, args=(0,)), start(target=rollout, args=(1,)), start(target=reward)]
    for worker in workers:
        worker.start()
    client = tq.get_client()
    for step in range(STEPS):
        for _ in range(PROMPTS // 2):  # two whole groups at a time, as soon as their rewards are there
            meta = client.get_meta(["answer", "reward"], 2 * GROUP, f"step_{step}", task_name="trainer", timeout=60)
            batch = client.get_data(meta, layout="dense")
            groups = batch["reward"].view(-1, GROUP)
            advantage = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)  # here your update
        print(f"step {step}: {PROMPTS * GROUP} rows, last advantages {[round(x, 1) for x in advantage[-1].tolist()]}")
        client.clear_partition(f"step_{step}")
    for worker in workers:
        worker.join()
    tq.close()
