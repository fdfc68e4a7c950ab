"""Samplers: which of the ready rows a fetch gets."""

from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.planned import Draw, PlannedSampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler

__all__ = [
    "BaseSampler",
    "Draw",
    "GRPOGroupNSampler",
    "PlannedSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
]
