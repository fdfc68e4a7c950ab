"""Samplers: which of the ready rows a fetch gets."""

from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.planned import ByPriority, ByWeight, Draw, PlannedSampler
from transfer_queue.sampler.priority_sampler import PrioritySampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.replay_sampler import ReplaySampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.token_budget_sampler import TokenBudgetSampler

__all__ = [
    "BaseSampler",
    "ByPriority",
    "ByWeight",
    "Draw",
    "GRPOGroupNSampler",
    "PlannedSampler",
    "PrioritySampler",
    "RankAwareSampler",
    "ReplaySampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "TokenBudgetSampler",
]
