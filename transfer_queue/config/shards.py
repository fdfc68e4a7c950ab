"""What each of several controllers of a queue has of what the queue has. Shards count from 0."""

from __future__ import annotations

__all__ = ["journal_of", "rows_of"]


def rows_of(rows: int | None, shard: int, shards: int) -> int | None:
    """The part of ``rows`` that one of so many shards may have; None is unlimited."""
    if rows is None:
        return None
    part, rest = divmod(rows, shards)
    return part + (shard < rest)


def journal_of(folder: str, shard: int, shards: int) -> str:
    """The folder of a shard's journal in that of the queue. It names their number: with another number of shards
    partitions would be looked for where they are not."""
    return folder if shards == 1 else f"{folder}/{shard}-of-{shards}"
