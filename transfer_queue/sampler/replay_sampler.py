"""Experience replay: rows by weight, again and again."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.planned import ByWeight, Draw, PlannedSampler, check_positive, rank_and_batch, tag_number

__all__ = ["ReplaySampler", "mix"]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class ReplaySampler(PlannedSampler):
    """Rows drawn with replacement, with a probability in proportion to their tag ``weight_tag`` (absent: 1; 0: never).

    Nothing is consumed, so that a row may be drawn several times, in the same batch too; rows leave when they are
    cleared. Fetches wait until ``min_rows`` rows are ready. ``seed`` makes the draws of one controller repeatable.

    Sampling config: ``seed`` (an int; the draw then depends on it and on the ready rows only); with ``dp_rank`` and
    ``batch_index``, a repeat of both returns the same rows.
    """

    config_keys = ("dp_rank", "batch_index", "seed")

    reads_tags = True

    def __init__(self, weight_tag: str = "weight", min_rows: int = 1, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(weight_tag, str) or not weight_tag:
            raise InvalidInputError(f"weight_tag must be the name of a tag; got {weight_tag!r}")
        self.weight_tag = weight_tag
        self.min_rows = check_positive("min_rows", min_rows)
        self.seed = _check_seed(seed)
        self.order = ByWeight(weight_tag)
        self._draws = 0

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        rank, batch = rank_and_batch(params, required=False)
        if params.get("seed") is not None:
            seed = _check_seed(params["seed"])
        else:
            self._draws += 1
            seed = mix(self.seed + GOLDEN * self._draws)
        return Draw(batch_size, 1, rank, batch, least=self.min_rows, seed=seed & _MASK)

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        tags = partition.get_custom_meta(ready) if partition is not None else {}
        weights = [tag_number(tags.get(row, {}), self.weight_tag, 1) for row in ready]
        for row, weight in zip(ready, weights, strict=True):
            if weight is None or weight < 0:
                raise InvalidInputError(f"row {row}: the tag {self.weight_tag} must be a number of 0 or more")
        sums = list(itertools.accumulate(weight or 0.0 for weight in weights))
        if len(ready) < self.min_rows or not sums or not sums[-1]:
            return [], []
        last = bisect.bisect_left(sums, sums[-1])
        draws = itertools.islice(_uniform(draw.seed or 0), draw.rows)
        return [ready[min(last, bisect.bisect_right(sums, share * sums[-1]))] for share in draws], []

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "draws": self._draws}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._draws = state.get("draws", 0)


def mix(number: int) -> int:
    """A 64-bit number that looks random (the output function of SplitMix64, Steele, Lea and Flood 2014)."""
    number &= _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def _uniform(seed: int) -> Iterator[float]:
    """Numbers from [0, 1), as the controller draws them."""
    return (float(mix(seed + GOLDEN * count) >> 11) * 2.0**-53 for count in itertools.count(1))


def _check_seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInputError(f"seed must be a whole number; got {seed!r}")
    return seed
