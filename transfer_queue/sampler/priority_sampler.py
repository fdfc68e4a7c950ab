"""The most urgent rows first, and none that are too old."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.planned import ByPriority, Draw, PlannedSampler, check_positive, rank_and_batch, tag_number

__all__ = ["PrioritySampler"]


class PrioritySampler(PlannedSampler):
    """Rows by falling tag ``priority_tag`` (absent: 0), the lowest index first among equals.

    With ``max_staleness``, for off-policy windows: a fetch names the version of the policy being trained as ``version``
    in its sampling config; rows whose tag ``version_tag`` (absent: 0) is more than ``max_staleness`` below it are given
    up: they count as consumed by the task and are handed to nobody. A fetch waits until enough rows inside the window
    are ready. Tags may change until a row is taken.

    Sampling config: ``version`` (required with ``max_staleness``); with ``dp_rank`` and ``batch_index``, a repeat of
    both returns the same rows.
    """

    config_keys = ("dp_rank", "batch_index", "version")

    reads_tags = True

    def __init__(
        self, max_staleness: int | None = None, priority_tag: str = "priority", version_tag: str = "version"
    ) -> None:
        super().__init__()
        if max_staleness != 0 and max_staleness is not None:
            check_positive("max_staleness, where it is not 0,", max_staleness)
        for name, value in (("priority_tag", priority_tag), ("version_tag", version_tag)):
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"{name} must be the name of a tag; got {value!r}")
        self.max_staleness = max_staleness
        self.priority_tag = priority_tag
        self.version_tag = version_tag
        self.order = ByPriority(priority_tag, version_tag)

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        rank, batch = rank_and_batch(params, required=False)
        oldest = None
        if self.max_staleness is not None:
            version = tag_number(params, "version", float("nan"))
            if version is None:
                raise InvalidInputError(
                    "sampling_config must name the version of the policy, a number, as max_staleness is set; got "
                    f"version={params.get('version')!r}"
                )
            oldest = version - self.max_staleness
        return Draw(batch_size, 1, rank, batch, oldest=oldest)

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        tags = partition.get_custom_meta(ready) if partition is not None else {}
        stale, fresh = [], []
        for row in ready:
            priority, version = (
                tag_number(tags.get(row, {}), name, 0) for name in (self.priority_tag, self.version_tag)
            )
            if priority is None or version is None:
                raise InvalidInputError(f"row {row}: {self.priority_tag} and {self.version_tag} must be finite numbers")
            if draw.oldest is not None and version < draw.oldest:
                stale.append(row)
            else:
                fresh.append((-priority, row))
        taken = [row for _, row in sorted(fresh)[: draw.rows]] if len(fresh) >= draw.rows else []
        return taken, [*taken, *stale]
