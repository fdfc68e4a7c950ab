"""The policy, how it plays a group of CartPole episodes, and how GRPO improves it. Nothing here knows of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["GROUP_SIZE", "Learner", "Policy", "Trajectory", "group_advantages", "play_group"]

GROUP_SIZE = 8
"""Episodes that start from the same state. Their returns are compared with each other only."""


class Policy(nn.Module):
    """Observation (…, 4) -> logits of the two actions (…, 2)."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.features = nn.Linear(4, hidden)
        self.logits = nn.Linear(hidden, 2)
        nn.init.zeros_(self.logits.weight)  # starts indifferent, so that early groups differ by luck only
        nn.init.zeros_(self.logits.bias)

    def forward(self, observations: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.features(observations).tanh())
        return logits

    def flat_weights(self) -> Tensor:
        """All parameters as one float32 vector."""
        return nn.utils.parameters_to_vector(self.parameters()).detach()

    def load_flat_weights(self, flat: Tensor) -> None:
        """The inverse of :meth:`flat_weights`."""
        nn.utils.vector_to_parameters(flat, self.parameters())


@dataclass(frozen=True)
class Trajectory:
    """One finished episode of L steps."""

    member: int
    """which of the group's episodes, 0…GROUP_SIZE-1"""
    observations: Tensor
    """float32 (L, 4)"""
    actions: Tensor
    """int64 (L,)"""
    logprobs: Tensor
    """float32 (L,): of the actions, under the policy that played"""
    rewards: Tensor
    """float32 (L,)"""
    ending: str
    """how it ended, for people"""

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())


def play_group(policy: Policy, seed: int, generator: torch.Generator) -> Iterator[Trajectory]:
    """Play GROUP_SIZE episodes from the initial state that ``seed`` gives, side by side; yield each as it finishes."""
    envs = [gymnasium.make("CartPole-v1") for _ in range(GROUP_SIZE)]
    observations = np.stack([env.reset(seed=seed)[0] for env in envs])
    steps: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in envs]
    rewards: list[list[float]] = [[] for _ in envs]
    playing = list(range(GROUP_SIZE))
    while playing:
        seen = torch.from_numpy(observations[playing])
        with torch.inference_mode():
            logprobs = policy(seen).log_softmax(-1)
            actions = torch.multinomial(logprobs.exp(), 1, generator=generator)
            chosen = logprobs.gather(1, actions)
        still_playing = []
        for row, (member, action) in enumerate(zip(playing, actions.squeeze(1).tolist(), strict=True)):
            observation, reward, fallen, time_up, _ = envs[member].step(action)
            steps[member].append((seen[row], actions[row], chosen[row]))
            rewards[member].append(float(reward))
            if fallen or time_up:
                ending = "balanced to the end" if time_up else f"fell at x={observation[0]:+.2f}"
                yield _trajectory(member, steps[member], rewards[member], ending)
            else:
                observations[member] = observation
                still_playing.append(member)
        playing = still_playing
    for env in envs:
        env.close()


def _trajectory(
    member: int, steps: list[tuple[Tensor, Tensor, Tensor]], rewards: list[float], ending: str
) -> Trajectory:
    observations, actions, logprobs = zip(*steps, strict=True)
    return Trajectory(
        member=member,
        observations=torch.stack(observations),
        actions=torch.cat(actions),
        logprobs=torch.cat(logprobs),
        rewards=torch.tensor(rewards),
        ending=ending,
    )


def group_advantages(returns: Tensor) -> Tensor:
    """Returns (n,) of whole consecutive groups -> advantages (n,): zero mean and unit deviation within each group."""
    groups = returns.view(-1, GROUP_SIZE)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()


class Learner:
    """GRPO with a clipped probability ratio: Shao et al. 2024, "DeepSeekMath", section 4.1, without the KL term."""

    def __init__(
        self, policy: Policy, *, learning_rate: float = 7e-3, decay: float = 0.98, epochs: int = 6, clip: float = 0.2
    ) -> None:
        self.policy = policy
        self.epochs = epochs
        self.clip = clip
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, decay)

    def update(self, observations: Tensor, actions: Tensor, logprobs: Tensor, advantages: Tensor) -> float:
        """One update on all steps of a batch. observations (S, 4), the others (S,); returns the last loss."""
        loss = torch.zeros(())
        for _ in range(self.epochs):
            current = self.policy(observations).log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)
            ratio = (current - logprobs).exp()
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())
