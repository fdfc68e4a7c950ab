"""Recipe: GRPO on sums, a text task that a program can verify, with a small transformer trained from scratch.

A rollout process samples groups of answers to prompts such as `3+4=`; a trainer process takes whole groups, compares
the answers of a group with each other and improves the policy. Rows, weights and the end of training all travel through
the queue.
"""

# %% The task
# A prompt is text, an answer is a character, and a reward needs no model: 1 for the right sum, else 0.
import argparse
import multiprocessing
import random
import time

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import transfer_queue as tq

LETTERS = "0123456789+="
GROUP = 8
PROMPTS = 16


def make_prompts(dice: random.Random) -> list[str]:
    return [f"{dice.randint(0, 4)}+{dice.randint(0, 4)}=" for _ in range(PROMPTS)]


def reward(prompt: str, answer: str) -> float:
    left, right = prompt.rstrip("=").split("+")
    return float(answer == str(int(left) + int(right)))


# %% The policy
# Two layers, one token a character.
class Policy(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.token = nn.Embedding(len(LETTERS), width)
        self.place = nn.Embedding(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, letters) of tokens -> (rows, letters, vocabulary) logits of the next one each."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.token(tokens) + self.place(torch.arange(length)), mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def answer(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, letters) -> a sampled token a row, and its log probability."""
        choice = torch.distributions.Categorical(logits=self(prompts)[:, -1])
        tokens = choice.sample()
        return tokens, choice.log_prob(tokens)


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])


# %% The rollout process
# Its batch of one version is whole groups one after the other: a group is consecutive rows.
def rollout(seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    dice, policy, version = random.Random(seed), Policy(), -1
    while True:
        tag = tq.kv_list("weights").get("weights", {}).get("policy", {"version": -1})
        if tag.get("done"):
            return
        if tag["version"] == version:
            time.sleep(0.002)  # on-policy: one batch a version
            continue
        version = tag["version"]
        flat = tq.kv_batch_get("policy", "weights", "flat")["flat"][0]
        nn.utils.vector_to_parameters(flat, policy.parameters())
        prompts = [prompt for prompt in make_prompts(dice) for _ in range(GROUP)]
        tokens, logprobs = policy.answer(encode(prompts))
        answers = [LETTERS[token] for token in tokens.tolist()]
        rewards = torch.tensor([reward(*pair) for pair in zip(prompts, answers, strict=True)])
        keys = [f"{version}/{number}" for number in range(len(prompts))]
        fields = {"prompt": prompts, "answer": answers, "logprobs": logprobs, "reward": rewards}
        tq.kv_batch_put(keys, "rollouts", TensorDict(fields, [len(keys)]), tags=[{"version": version}] * len(keys))


# %% The trainer process
# Advantages are rewards less the mean of their group over its spread (Shao et al. 2024); the ratio is clipped.
def train(goal: float, limit_s: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    client, policy = tq.get_client(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 2e-3)
    began, mean, version = time.monotonic(), 0.0, 0
    first = None
    while mean < goal and time.monotonic() - began < limit_s:
        flat = nn.utils.parameters_to_vector(policy.parameters()).detach()
        tq.kv_put("policy", "weights", {"flat": flat}, tag={"version": version})
        meta = client.get_meta(
            ["prompt", "answer", "logprobs", "reward"], GROUP * PROMPTS, "rollouts", task_name="train", timeout=60.0
        )
        batch = client.get_data(meta)
        prompts, answers = encode(list(batch["prompt"])), encode(list(batch["answer"]))[:, 0]
        rewards = batch["reward"].view(-1, GROUP)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        now = torch.distributions.Categorical(logits=policy(prompts)[:, -1])
        ratio = (now.log_prob(answers) - batch["logprobs"]).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        (-gain - 0.1 * now.entropy().mean()).backward()  # entropy: or it settles on wrong sums
        optimizer.step()
        client.clear_samples(meta)
        reached = float(rewards.mean())
        first = reached if first is None else first
        mean = reached if version == 0 else 0.9 * mean + 0.1 * reached
        version += 1
        if version % 25 == 0 or mean >= goal:
            print(f"update {version:4d}  mean reward {mean:.2f}", flush=True)
    tq.kv_put("policy", "weights", tag={"done": True})
    print(f"mean reward rose from {first:.2f} to {mean:.2f} in {version} updates", flush=True)
    if mean < goal:
        raise SystemExit(f"the goal of {goal} was not reached within {limit_s:g} s")


# %% The job
# The queue hands out whole groups of eight.
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--goal", type=float, default=0.6, help="mean reward; a policy that guesses makes 0.08")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which training gives up")
    arguments = parser.parse_args()
    tq.init({"controller": {"sampler": tq.GRPOGroupNSampler(GROUP)}})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict"])
    trainer = context.Process(target=_attached, args=(train, arguments.goal, arguments.limit))
    worker = context.Process(target=_attached, args=(rollout, 1))
    for process in (trainer, worker):
        process.start()
    trainer.join()
    worker.join(10)
    worker.kill()
    tq.close()
    raise SystemExit(trainer.exitcode)


def _attached(stage: object, *arguments: object) -> None:
    tq.init()
    stage(*arguments)  # type: ignore[operator]
    tq.close()


if __name__ == "__main__":
    main()
