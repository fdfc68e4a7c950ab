"""A sampler of Relax's fork of 0.1.7: micro-batches by tokens where a budget is named, else whole groups."""

from __future__ import annotations

from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.sampler.planned import check_positive, total_lengths

__all__ = ["StreamingTokenBudgetSampler"]


class StreamingTokenBudgetSampler(GRPOGroupNSampler):
    """Samples by tokens or by groups. Without ``token_budget`` in the sampling config it works like
    `GRPOGroupNSampler`.

    With it, a fetch gets the next rows of its rank, as many as hold at most ``token_budget`` tokens, and at least one.
    Rows are dealt to the ranks when their group is complete, or when no more rows come; the rows of a group may go to
    different ranks, and each row goes to the rank with the fewest tokens. A row's tokens are its tag
    ``total_lengths``; without it, it counts as the whole budget. A fetch is answered with the rows that its rank has,
    whether or not they fill the budget, unless ``allow_underfill`` is false.

    Sampling config: ``token_budget``, ``dp_rank``, ``dp_size``, ``allow_underfill`` (true) and ``batch_index``
    (optional; a repeat gets the same rows).

    Args:
        n_samples_per_prompt: Rows in a group.
        balance_unit_multiplier: Up to this many groups for each rank are dealt at once, while a rank has less than a
            budget.
    """

    def __init__(self, n_samples_per_prompt: int = 1, balance_unit_multiplier: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.balance_unit_multiplier = check_positive("balance_unit_multiplier", balance_unit_multiplier)
        self._dealt: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
        """(partition, task) -> rank -> row -> tokens, of rows dealt to the rank that it has not got yet."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        if kwargs.get("token_budget") is None:
            return super().sample(ready_indexes, batch_size, **kwargs)
        budget, ranks, rank = _checked(kwargs)
        name = (str(kwargs.get("partition_id", "")), str(kwargs.get("task_name", "")))
        batch = kwargs.get("batch_index")
        known = self._states.get(name[0], {}).get(name[1], {}).get(rank, {}).get(batch)
        if batch is not None and known is not None:
            return list(known), list(known)
        partition = kwargs.get("partition")
        if partition is None:
            raise InvalidInputError("a sample by token_budget needs partition, which has the tags of the rows")
        ended = bool(kwargs.get("production_done", getattr(partition, "production_done", False)))
        shares = self._deal(name, sorted(ready_indexes), ranks, budget, partition, ended)
        rows = _micro_batch(shares[rank], budget, kwargs.get("allow_underfill", True) or ended)
        for row in rows:
            del shares[rank][row]
        if batch is not None and (rows or ended):  # an empty batch is final once no more rows come
            batches = self._states.setdefault(name[0], {}).setdefault(name[1], {})
            batches.setdefault(rank, {})[batch] = list(rows)
        return rows, list(rows)

    def _deal(
        self, name: tuple[str, str], ready: list[int], ranks: int, budget: int, partition: Any, ended: bool
    ) -> dict[int, dict[int, float]]:
        """What each rank has, after rows were dealt until each has a budget or none are left."""
        known, before = set(ready), self._dealt.get(name, {})
        shares = {
            rank: {row: tokens for row, tokens in before.get(rank, {}).items() if row in known} for rank in range(ranks)
        }
        self._dealt[name] = shares
        taken = {row for share in shares.values() for row in share}
        free = [row for row in ready if row not in taken]
        grouped = self._lowest(free, None)
        unit = self.n_samples_per_prompt * ranks * self.balance_unit_multiplier
        rounds = [grouped[first : first + unit] for first in range(0, len(grouped), unit)]
        if ended:  # groups that were never completed
            whole = set(grouped)
            rounds.append([row for row in free if row not in whole])
        loads = [sum(shares[rank].values()) for rank in range(ranks)]
        for rows in rounds:
            if min(loads) >= budget:
                break
            lengths = dict(zip(rows, total_lengths(rows, partition, default=budget), strict=True))
            for row, length in sorted(lengths.items(), key=lambda item: (-item[1], item[0])):
                rank = loads.index(min(loads))
                shares[rank][row] = length
                loads[rank] += length
        return shares

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        for name in [name for name in self._dealt if name[0] == partition_id]:
            del self._dealt[name]

    def save_checkpoint(self) -> dict[str, Any]:
        dealt = [
            [*name, rank, list(share.items())] for name, shares in self._dealt.items() for rank, share in shares.items()
        ]
        return {**super().save_checkpoint(), "dealt": dealt}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._dealt = {}
        for partition, task, rank, share in state.get("dealt", []):
            self._dealt.setdefault((partition, task), {})[rank] = dict(share)


def _checked(params: dict[str, Any]) -> tuple[int, int, int]:
    """``token_budget``, ``dp_size`` and ``dp_rank`` of a sampling config. Raises InvalidInputError."""
    budget = check_positive("token_budget", params["token_budget"])
    rank, ranks = params.get("dp_rank"), params.get("dp_size")
    if rank is None or ranks is None:
        raise InvalidInputError("a sample by token_budget needs dp_rank and dp_size in its sampling config")
    check_positive("dp_size", ranks)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise InvalidInputError(f"dp_rank must be a whole number from 0 to dp_size - 1 ({ranks - 1}); got {rank!r}")
    return budget, ranks, rank


def _micro_batch(share: dict[int, float], budget: int, underfill: bool) -> list[int]:
    """The lowest rows of a rank that fit the budget, at least one; none if more could fit and not ``underfill``."""
    rows: list[int] = []
    tokens = 0.0
    for row, length in sorted(share.items()):
        if rows and tokens + length > budget:
            return rows
        rows.append(row)
        tokens += length
    return rows if underfill or tokens >= budget else []
