"""Samplers that say beforehand what they will take, so that the controller need not show them every ready row."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.base import BaseSampler

__all__ = [
    "ByPriority",
    "ByWeight",
    "Draw",
    "PlannedSampler",
    "check_groups",
    "check_positive",
    "rank_and_batch",
    "tag_number",
]


class ByPriority(NamedTuple):
    """Rows leave by falling tag ``priority`` (absent: 0), the lowest index first among equals; the tag ``version``
    (absent: 0) says which of them are too old, see `Draw.oldest`."""

    priority: str
    version: str


class ByWeight(NamedTuple):
    """Rows are drawn with replacement, with a probability in proportion to the tag ``weight`` (absent: 1)."""

    weight: str


class Draw(NamedTuple):
    """Take the next ``rows`` ready rows (in whole groups, see `PlannedSampler.group`) and deal them to ``ranks`` ranks.
    With ``batch`` set, ``rank`` gets the same rows each time it asks for that batch."""

    rows: int
    ranks: int = 1
    rank: int = 0
    batch: int | str | None = None
    least: int = 0
    """Ready rows below which there is nothing to try; 0: ``rows``."""
    tokens: float | None = None
    """Most tokens a rank; ``rows`` is then the most, not the exact number: see `PlannedSampler.fit`."""
    flush: bool = False
    """With ``tokens``: take what there is, though more would fit."""
    rest: bool = False
    """With ``tokens``: no more rows come, so that some ranks may get none."""
    oldest: float | None = None
    """With `ByPriority`: rows of a lower version are given up (consumed, but handed to nobody)."""
    seed: int | None = None
    """With `ByWeight`: of the random numbers. Nothing is consumed."""

    @property
    def needs(self) -> int:
        return self.least or self.rows


class PlannedSampler(BaseSampler):
    """Base of the built-in samplers. A subclass that overrides `sample` is treated as a user's sampler."""

    group: int = 1
    """Rows leave in whole groups of this many consecutive ones."""
    order: ByPriority | ByWeight | None = None
    """In which order rows leave; None: lowest index first. Not together with groups."""

    @property
    def shown_rows(self) -> bool:
        """Return whether it has to be shown every ready row, like a user's sampler."""
        return False

    config_keys: tuple[str, ...] = ("dp_rank", "batch_index")
    """What it reads of the ``sampling_config`` of a fetch."""
    reads_tags: bool = False
    """True if a changed tag can make a fetch possible that was not before."""

    def __init__(self) -> None:
        super().__init__()
        self._promised: dict[tuple[str, str], set[int]] = {}
        """(partition, task) -> rows dealt to ranks that have not asked for them yet."""

    @abstractmethod
    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        """Return what a fetch takes. Raises InvalidInputError for parameters that make no sense."""

    def has_rank(self, params: Mapping[str, Any]) -> bool:
        """Return whether draws deal rows to the rank. Otherwise `sample` returns no rows and `plan` refuses the
        rank."""
        return True

    def offered(self, ready_indexes: Sequence[int]) -> list[int]:
        """The candidates of `sample`, in the order of preference."""
        return sorted(ready_indexes)

    def share(self, rows: list[int], ranks: int, lengths: Sequence[float]) -> list[list[int]]:
        """Deal drawn rows to ranks; ``lengths`` is each row's tag ``total_lengths``, 1 where absent."""
        size = len(rows) // ranks
        return [rows[rank * size : (rank + 1) * size] for rank in range(ranks)]

    def fit(self, lengths: Sequence[float], draw: Draw) -> list[list[int]] | None:
        """For draws with ``tokens``: the positions in ``lengths`` (of the next ready rows, at most ``draw.rows``) that
        each rank gets, None if more rows should be waited for."""
        raise NotImplementedError(f"{type(self).__name__} plans draws by tokens but does not say what fits")

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        """(rows taken, rows spent) of a draw from ``ready``, as `offered`; nothing taken if they do not suffice."""
        rows = self._lowest(ready, draw.rows)
        return rows, rows

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The same choice from a plain list, for use without a controller: see `BaseSampler.sample`.

        Rows dealt to a rank that has not asked for them yet are left alone by later draws.
        """
        if not self.has_rank(kwargs):
            return [], []
        draw = self.plan(batch_size, kwargs)._replace(rest=getattr(kwargs.get("partition"), "production_done", False))
        name = (str(kwargs.get("partition_id", "")), str(kwargs.get("task_name", "")))
        batches = self._states.setdefault(name[0], {}).setdefault(name[1], {})
        promised = self._promised.setdefault(name, set())
        if draw.batch is not None and (known := batches.get(draw.rank, {}).get(draw.batch)) is not None:
            promised.difference_update(known)
            return list(known), [] if draw.seed is not None else list(known)
        partition = kwargs.get("partition")
        free = [index for index in self.offered(ready_indexes) if index not in promised]
        rows, spent = self.choose(free, draw, partition)
        if not rows or draw.batch is None:
            return rows, list(spent)
        if draw.ranks == 1:
            shares = {draw.rank: rows}
        elif draw.tokens is not None:
            shares = dict(enumerate(self._fitted(free, draw, partition)))
        else:
            shares = dict(enumerate(self.share(rows, draw.ranks, total_lengths(rows, partition))))
        for rank, share in shares.items():
            batches.setdefault(rank, {})[draw.batch] = share
            if rank != draw.rank:
                promised.update(share)
        own = list(shares[draw.rank])
        return own, (list(spent) if draw.ranks == 1 else list(own))

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

    def _lowest(self, ready: list[int], wanted: int | None) -> list[int]:
        """The lowest ``wanted`` rows in whole groups, none if there are fewer; None: all there are."""
        count = len(ready) if wanted is None else wanted
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
        return chosen if wanted is None or len(chosen) == count else []

    def _fitted(self, ready: list[int], draw: Draw, partition: Any) -> list[list[int]]:
        next_rows = self._lowest(ready, None)[: draw.rows]
        shares = self.fit(total_lengths(next_rows, partition), draw) if next_rows else None
        return [[next_rows[position] for position in share] for share in shares or []]


def check_groups(batch_size: int, n_samples_per_prompt: int) -> None:
    """Raises InvalidInputError unless the batch is of whole groups."""
    if batch_size % n_samples_per_prompt:
        raise InvalidInputError(
            f"batch_size must be a multiple of n_samples_per_prompt ({n_samples_per_prompt}); got {batch_size}"
        )


def check_positive(name: str, value: object) -> int:
    """``value`` if it is an int above 0. Raises InvalidInputError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(f"{name} must be positive, a whole number; got {value!r}")
    return value


def tag_number(tag: Mapping[str, Any], name: str, default: float) -> float | None:
    """A tag's entry as a number; None if it is there and no finite number."""
    value = tag.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def total_lengths(rows: list[int], partition: Any, default: float = 1) -> list[float]:
    """Each row's tag ``total_lengths``, ``default`` where absent.

    Raises InvalidInputError for a value that is negative or not finite, as sums of it would be meaningless.
    """
    tags = partition.get_custom_meta(rows) if partition is not None else {}
    for row in rows:
        tag = tags.get(row, {})
        length = tag_number(tag, "total_lengths", default)
        if length is None or length < 0:
            raise InvalidInputError(
                f"the tag total_lengths must be a number of tokens, not {tag['total_lengths']!r} (row {row})"
            )
    return [tags.get(row, {}).get("total_lengths", default) for row in rows]


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
