"""End markers, by which producers declare that a partition gets no more rows."""

from __future__ import annotations

from transfer_queue.client.arguments import check_count, check_partition, check_text
from transfer_queue.client.client import Client
from transfer_queue.errors import InvalidInputError
from transfer_queue.lifecycle import current_client

__all__ = ["MARKERS", "clear_end", "mark_end", "production_ended"]

MARKERS = "transfer_queue.ended"
"""The partition of the markers: one key for each marked partition, whose tag is ``{producer: number of producers}``.
With several controllers there is one on each, called alike, for the partitions there."""


def mark_end(partition_id: str, producer: str = "", producers: int = 1, client: Client | None = None) -> None:
    """Say that ``producer`` puts no more rows into ``partition_id``; call it after its last put has returned.

    The partition has ended once ``producers`` producers of different names have said so. Streaming datasets then hand
    out what is left, also less than a batch, and end. The marker outlives the partition: before reusing the name, call
    ``clear_end``. With a single producer, ``put(..., is_last=True)`` has the same effect. Raises InvalidInputError,
    InvalidTypeError.
    """
    check_partition(partition_id)
    check_text("producer", producer)
    if check_count("producers", producers) < 1:
        raise InvalidInputError(f"producers must be at least 1, not {producers}")
    client = client or current_client()
    client.run(client.kv.put_one, partition_id, _markers(client, partition_id), None, {producer: producers}, None)


def clear_end(partition_id: str, client: Client | None = None) -> None:
    """Take back all marks of ``partition_id``. Idempotent. Raises InvalidInputError, InvalidTypeError."""
    check_partition(partition_id)
    client = client or current_client()
    client.run(client.kv.clear, [partition_id], _markers(client, partition_id))


def production_ended(client: Client, partition_id: str) -> bool:
    """Whether the partition is complete: a put had ``is_last``, or all producers have marked the end."""
    meta = client.run(client.kv.retrieve_meta, [partition_id], _markers(client, partition_id), False, False)
    if any(tag and len(tag) >= max(tag.values()) for tag in meta.custom_meta):
        return True
    return bool(client.run(client.rows.partition_counts, partition_id).get("ended"))


def _markers(client: Client, partition_id: str) -> str:
    return client.engine.beside(MARKERS, partition_id)
