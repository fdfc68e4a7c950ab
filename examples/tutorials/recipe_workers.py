"""Recipe: spawned rollout workers and a GRPO trainer.

The trainer is the program that is started. It starts the queue, and then the workers, which find the queue by the
environment that they inherit. The task: for each of two prompts, one of eight actions is rewarded.
"""

# %% The rollout workers
# Each writes a group for each policy that the trainer publishes: eight answers to one prompt.
# A group is one put: the sampler counts consecutive rows, so a group in several puts could mix with another.
import multiprocessing
import time

import torch
from tensordict import TensorDict

import transfer_queue as tq

GROUP, ACTIONS, PROMPTS, WORKERS = 8, 8, 2, 2
GOOD = torch.tensor([5, 2])  # the rewarded action of each prompt


def rollout(worker: int) -> None:
    tq.init()  # the queue of the process that started this one
    torch.manual_seed(worker)
    prompt = worker % PROMPTS
    seen = -1
    while not (tag := tq.kv_list("weights")["weights"]["policy"]).get("done"):
        if tag["version"] == seen:
            time.sleep(0.005)
            continue
        seen = tag["version"]
        logits = tq.kv_batch_get(["policy"], "weights")["logits"][0]
        policy = torch.distributions.Categorical(logits=logits.reshape(PROMPTS, ACTIONS)[prompt])
        actions = policy.sample((GROUP,))
        group = {
            "prompt": torch.full((GROUP,), prompt),
            "action": actions,
            "logprob": policy.log_prob(actions),
            "reward": (actions == GOOD[prompt]).float(),
        }
        tq.get_client().put(TensorDict(group, [GROUP]), partition_id="rollouts")
    tq.close()


# %% The trainer
# A fetch takes whole groups. The advantage of an answer is its reward relative to its group.
def train(updates: int) -> float:
    client = tq.get_client()
    logits = torch.zeros(PROMPTS, ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    share = 0.0
    for version in range(updates):
        tq.kv_put("policy", "weights", {"logits": logits.detach().flatten()}, tag={"version": version})
        fields = ["prompt", "action", "logprob", "reward"]
        meta = client.get_meta(fields, GROUP * 2, "rollouts", task_name="train", timeout=60.0)
        batch = client.get_data(meta)
        rewards = batch["reward"].view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        now = torch.distributions.Categorical(logits=logits[batch["prompt"]])
        ratio = (now.log_prob(batch["action"]) - batch["logprob"]).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.clear_samples(meta)
        share = float(logits.detach().softmax(-1)[torch.arange(PROMPTS), GOOD].mean())
    tq.kv_put("policy", "weights", tag={"done": True})
    return share


# %% The job
def main() -> None:
    tq.init({"controller": {"sampler": tq.GRPOGroupNSampler(GROUP)}})
    tq.kv_put("policy", "weights", {"logits": torch.zeros(PROMPTS * ACTIONS)}, tag={"version": -1})
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=rollout, args=(worker,), daemon=True) for worker in range(WORKERS)]
    for worker in workers:
        worker.start()
    share = train(updates=50)
    for worker in workers:
        worker.join()
    tq.close()
    print(f"learned: {share > 0.8}")  # learned: True


if __name__ == "__main__":
    main()
