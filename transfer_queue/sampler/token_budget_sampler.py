"""Micro-batches of a bounded number of tokens, balanced over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.planned import Draw, PlannedSampler, check_groups, check_positive, rank_and_batch

__all__ = ["TokenBudgetSampler"]


class TokenBudgetSampler(PlannedSampler):
    """A fetch gets the next ready rows, as many as hold at most ``token_budget`` tokens, and at most ``batch_size``
    unless that is 0.

    A row's tokens are its tag ``total_lengths`` (1 where absent). A fetch is answered once no further row fits, or
    ``batch_size`` rows are there; with what is ready where the sampling config has ``flush`` true, or the last put said
    ``is_last`` and all rows are ready. A row or group that holds more than the budget gets a micro-batch of its
    own.

    With ``dp_size`` > 1 the micro-batches of all ranks are made at once, none above the budget, each of at least one
    group, the sums of tokens close to each other; numbers of rows may differ. Of the last ones some ranks may get
    nothing. Every rank must ask for every batch. Rows leave in whole groups of ``n_samples_per_prompt``.

    Sampling config: ``token_budget`` and ``dp_size`` (instead of the constructor's), ``flush`` (false), ``dp_rank`` and
    ``batch_index`` (both 0 with several ranks, and a repeat gets the same rows; optional with one).
    """

    config_keys = ("dp_rank", "batch_index", "dp_size", "token_budget", "flush")

    reads_tags = True

    def __init__(self, token_budget: int, dp_size: int = 1, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        self.token_budget = check_positive("token_budget", token_budget)
        self.dp_size = check_positive("dp_size", dp_size)
        self.n_samples_per_prompt = check_positive("n_samples_per_prompt", n_samples_per_prompt)
        self.group = n_samples_per_prompt

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        ranks = check_positive("dp_size", params.get("dp_size", self.dp_size))
        if ranks > 1:
            params = {"dp_rank": 0, "batch_index": 0, **params}
        rank, batch = rank_and_batch(params, required=ranks > 1)
        if ranks > 1 and rank >= ranks:
            raise InvalidInputError(f"dp_rank must be less than dp_size ({ranks}); got {rank}")
        flush = params.get("flush", False)
        if not isinstance(flush, bool):
            raise InvalidInputError(f"flush must be true or false; got {flush!r}")
        tokens = check_positive("token_budget", params.get("token_budget", self.token_budget))
        if batch_size:
            check_groups(batch_size, self.group)
        else:  # a row holds a token, if not more
            batch_size = math.ceil(tokens / self.group) * self.group
        return Draw(batch_size * ranks, ranks, rank, batch, least=self.group, tokens=tokens, flush=flush)

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        rows = sorted(row for share in self._fitted(ready, draw, partition) for row in share)
        return rows, rows

    def fit(self, lengths: Sequence[float], draw: Draw) -> list[list[int]] | None:
        assert draw.tokens is not None
        for length in lengths:
            if not (math.isfinite(length) and length >= 0):
                raise InvalidInputError(f"the tag total_lengths must be a number of tokens, not {length!r}")
        n, most = self.group, draw.rows // draw.ranks // self.group
        costs = [sum(lengths[first : first + n]) for first in range(0, len(lengths) - n + 1, n)]
        # In order, each where there is most room left, until one finds room nowhere: no row is passed over for ever.
        dealt, full = _deal(range(len(costs)), costs, draw.ranks, most, draw.tokens)
        if not all(dealt) and not (draw.rest and any(dealt)):
            return None
        taken = sum(map(len, dealt))
        full = full or taken == most * draw.ranks or all(sum(costs[i] for i in own) >= draw.tokens for own in dealt)
        if not (full or draw.flush or draw.rest):
            return None
        # The same rows from the longest down are balanced better; seldom they do not fit that way.
        longest_first = sorted(range(taken), key=lambda item: -costs[item])
        better, left_over = _deal(longest_first, costs, draw.ranks, most, draw.tokens)
        shares = dealt if left_over else better
        return [[group * n + member for group in sorted(share) for member in range(n)] for share in shares]


def _deal(
    items: Sequence[int], costs: Sequence[float], ranks: int, most: int, budget: float
) -> tuple[list[list[int]], bool]:
    """Items to the rank of the least cost that may take them; stops at one that none may take (True)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for item in items:
        fitting = [
            rank
            for rank in range(ranks)
            if not shares[rank] or (len(shares[rank]) < most and loads[rank] + costs[item] <= budget)
        ]
        if not fitting:
            return shares, True
        rank = min(fitting, key=lambda rank: (loads[rank], len(shares[rank])))
        shares[rank].append(item)
        loads[rank] += costs[item]
    return shares, False
