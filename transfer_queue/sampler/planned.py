"""Samplers that say beforehand what they will take, so that the controller need not show them every ready row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.base import BaseSampler

__all__ = ["Draw", "PlannedSampler", "rank_and_batch"]


class Draw(NamedTuple):
    """Take the ``rows`` lowest ready rows (in whole groups, see `PlannedSampler.group`) and deal them to ``ranks``
    ranks. With ``batch`` set, ``rank`` gets the same rows each time it asks for that batch."""

    rows: int
    ranks: int = 1
    rank: int = 0
    batch: int | str | None = None


class PlannedSampler(BaseSampler):
    """Base of the built-in samplers. A subclass that overrides `sample` is treated as a user's sampler."""

    group: int = 1
    """Rows leave in whole groups of this many consecutive ones."""

    def __init__(self) -> None:
        super().__init__()
        self._promised: dict[tuple[str, str], set[int]] = {}
        """(partition, task) -> rows dealt to ranks that have not asked for them yet."""

    @abstractmethod
    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        """What a fetch takes. Raises InvalidInputError for parameters that make no sense."""

    def share(self, rows: list[int], ranks: int, lengths: Sequence[float]) -> list[list[int]]:
        """Deal drawn rows to ranks; ``lengths`` is each row's tag ``total_lengths``, 1 where absent."""
        size = len(rows) // ranks
        return [rows[rank * size : (rank + 1) * size] for rank in range(ranks)]

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The same choice from a plain list, for use without a controller: see `BaseSampler.sample`.

        Rows dealt to a rank that has not asked for them yet are left alone by later draws.
        """
        draw = self.plan(batch_size, kwargs)
        name = (str(kwargs.get("partition_id", "")), str(kwargs.get("task_name", "")))
        batches = self._states.setdefault(name[0], {}).setdefault(name[1], {})
        promised = self._promised.setdefault(name, set())
        if draw.batch is not None and (known := batches.get(draw.rank, {}).get(draw.batch)) is not None:
            promised.difference_update(known)
            return list(known), list(known)
        rows = self._lowest([index for index in sorted(ready_indexes) if index not in promised], draw.rows)
        if not rows or draw.batch is None:
            return rows, list(rows)
        if draw.ranks == 1:
            shares = {draw.rank: rows}
        else:
            shares = dict(enumerate(self.share(rows, draw.ranks, total_lengths(rows, kwargs.get("partition")))))
        for rank, share in shares.items():
            batches.setdefault(rank, {})[draw.batch] = share
            if rank != draw.rank:
                promised.update(share)
        return list(shares[draw.rank]), list(shares[draw.rank])

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        for name in [name for name in self._promised if name[0] == partition_id]:
            del self._promised[name]

    def save_checkpoint(self) -> dict[str, Any]:
        promised = [[partition, task, sorted(rows)] for (partition, task), rows in self._promised.items()]
        return {**super().save_checkpoint(), "promised": promised}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._promised = {(partition, task): set(rows) for partition, task, rows in state.get("promised", [])}

    def _lowest(self, ready: list[int], count: int) -> list[int]:
        if self.group == 1:
            return ready[:count] if len(ready) >= count else []
        chosen: list[int] = []
        first, group = 0, self.group
        while len(chosen) < count and first + group <= len(ready):
            if ready[first + group - 1] - ready[first] == group - 1:
                chosen += ready[first : first + group]
                first += group
            else:
                first += 1
        return chosen if len(chosen) == count else []


def total_lengths(rows: list[int], partition: Any) -> list[float]:
    """Each row's tag ``total_lengths``, 1 where absent."""
    tags = partition.get_custom_meta(rows) if partition is not None else {}
    return [tags.get(row, {}).get("total_lengths", 1) for row in rows]


def rank_and_batch(params: Mapping[str, Any], *, required: bool) -> tuple[int, int | str | None]:
    """``dp_rank`` and ``batch_index`` of a sampling config; batch None if neither is there and none is required."""
    rank, batch = params.get("dp_rank"), params.get("batch_index")
    if not required and (rank is None or batch is None):
        return 0, None
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise InvalidInputError(f"dp_rank must be an integer greater than or equal to 0; got {rank!r}")
    if isinstance(batch, bool) or not isinstance(batch, int | str):
        raise InvalidInputError(f"batch_index must be an integer or a string; got {batch!r}")
    return rank, batch
