"""A sampler of Relax's fork of 0.1.7: micro-batches by tokens where a budget is named, else whole groups."""

from __future__ import annotations

from typing import Any

from transfer_queue.sampler import GRPOGroupNSampler, TokenBudgetSampler
from transfer_queue.sampler.planned import check_positive

__all__ = ["StreamingTokenBudgetSampler"]


class _Counted:
    """A partition whose rows all have the tag ``total_lengths``; it is ``default`` where absent."""

    def __init__(self, partition: Any, default: int) -> None:
        self._partition = partition
        self._default = default
        self.production_done = getattr(partition, "production_done", False)

    def get_custom_meta(self, global_indices: list[int]) -> dict[int, dict[str, Any]]:
        found = {} if self._partition is None else self._partition.get_custom_meta(global_indices)
        return {index: {"total_lengths": self._default, **found.get(index, {})} for index in global_indices}


class StreamingTokenBudgetSampler(GRPOGroupNSampler):
    """Samples by tokens or by groups. With ``token_budget`` in the sampling config it works like `TokenBudgetSampler`,
    in whole groups, for ``dp_size`` ranks of the config; a row without the tag ``total_lengths`` counts as the whole
    budget. Unless ``allow_underfill`` is false there, it also returns rows that do not fill the budget, once there is a
    group for each rank. Without a budget it works like `GRPOGroupNSampler`.

    ``balance_unit_multiplier`` is checked and has no further effect: all ready rows are balanced.
    """

    def __init__(self, n_samples_per_prompt: int = 1, balance_unit_multiplier: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.balance_unit_multiplier = check_positive("balance_unit_multiplier", balance_unit_multiplier)
        self._by_tokens = TokenBudgetSampler(token_budget=1, n_samples_per_prompt=n_samples_per_prompt)

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        budget = kwargs.get("token_budget")
        if budget is None:
            return super().sample(ready_indexes, batch_size, **kwargs)
        options = {"flush": kwargs.get("allow_underfill", True), "partition": _Counted(kwargs.get("partition"), budget)}
        return self._by_tokens.sample(ready_indexes, 0, **{**kwargs, **options})

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        by_tokens = (sampling_config or {}).get("token_budget") is not None
        known = self._by_tokens.has_cached_result if by_tokens else super().has_cached_result
        return known(partition_id, task_name, sampling_config)

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._by_tokens.clear_cache(partition_id)

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "by_tokens": self._by_tokens.save_checkpoint()}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._by_tokens.load_checkpoint(state["by_tokens"])
