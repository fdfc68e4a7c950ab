"""Whole groups of samples of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidInputError
from transfer_queue.sampler.planned import Draw, PlannedSampler, check_groups, check_positive, rank_and_batch

__all__ = ["GRPOGroupNSampler"]


class GRPOGroupNSampler(PlannedSampler):
    """Only complete groups of ``n_samples_per_prompt`` rows, the one with the lowest row first.

    With ``group_tag`` a group is ``n_samples_per_prompt`` rows whose tags have the same value of this name, written in
    any order and by any number of clients; every row needs the tag. The controller then looks at all ready rows for
    each fetch.

    Without it, the groups are rows 0 to n-1, n to 2n-1, … of the partition in order of creation, so that the rows of a
    group must be created together, by one put of keys and tags or of data. If one client begins a group and another
    continues it, the group mixes prompts, and fetches from the partition raise SamplerError. A client whose puts split
    a group logs a warning once: the rows are in order only if one loop puts them.

    With ``dp_rank`` and ``batch_index`` in the sampling config, a repeat of both returns the same rows.
    """

    def __init__(self, n_samples_per_prompt: int = 1, *, group_tag: str | None = None) -> None:
        super().__init__()
        self.n_samples_per_prompt = check_positive("n_samples_per_prompt", n_samples_per_prompt)
        if group_tag is not None and (not isinstance(group_tag, str) or not group_tag):
            raise InvalidInputError(f"group_tag must be the name of a tag, not {group_tag!r}")
        self.group_tag = group_tag
        self.group = n_samples_per_prompt

    def plan(self, batch_size: int, params: Mapping[str, Any]) -> Draw:
        check_groups(batch_size, self.group)
        rank, batch = rank_and_batch(params, required=False)
        return Draw(batch_size, 1, rank, batch)

    @property
    def shown_rows(self) -> bool:
        return self.group_tag is not None

    def choose(self, ready: list[int], draw: Draw, partition: Any) -> tuple[list[int], list[int]]:
        if self.group_tag is None:
            return super().choose(ready, draw, partition)
        tags = partition.get_custom_meta(ready) if partition is not None else {}
        begun: dict[Any, list[int]] = {}
        chosen: list[list[int]] = []
        for row in ready:
            value = tags.get(row, {}).get(self.group_tag)
            if not isinstance(value, str | int):
                raise InvalidInputError(
                    f"row {row} needs the tag {self.group_tag!r} with a string or whole number that the rows of its "
                    f"group share, not {value!r}"
                )
            members = begun.setdefault(value, [])
            members.append(row)
            if len(members) == self.group:
                chosen.append(begun.pop(value))
        rows = [row for members in sorted(chosen)[: draw.rows // self.group] for row in members]
        return (rows, rows) if len(rows) == draw.rows else ([], [])
