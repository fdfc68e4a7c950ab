"""Several controllers behind one queue: which of them has which partition, and whose a block is.

A partition lives on one shard, which a hash of its name decides (rendezvous hashing, the same in every process). So
controllers never need to agree on anything: a client that knows how many there are knows whom to ask. The numbers of a
queue's writers carry the shard in their highest bits, so that a storage unit knows whose block it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from transfer_queue.control.commands import Value
from transfer_queue.control.requests import Request, Scope

__all__ = ["Shard", "merge_values", "shard_of", "shard_of_block", "shard_of_writer", "spans", "writer_bits"]

_WRITER_BITS = 31
"""Of a block id's 63; the low 32 are the writer's count."""


class Shard(msgspec.Struct, frozen=True):
    """One of the controllers that share a queue, as it introduces itself in ``Welcome.attributes``."""

    number: int
    addresses: list[str]
    """host:port of every shard, by number."""

    def attribute(self) -> dict[str, Any]:
        return {"shard": msgspec.to_builtins(self)}

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Shard | None:
        """None: the queue has one controller."""
        found = attributes.get("shard")
        return None if found is None else msgspec.convert(found, cls)


@lru_cache(maxsize=1 << 14)
def shard_of(partition: str, shards: int) -> int:
    """Return the number of the shard that has the partition."""
    name = partition.encode("utf-8", "surrogatepass")
    return max(range(shards), key=lambda shard: blake2b(name, digest_size=8, salt=shard.to_bytes(2, "little")).digest())


def writer_bits(shards: int) -> int:
    """Low bits of a writer's number that a shard is free to choose; its own number lies above them."""
    return _WRITER_BITS - (shards - 1).bit_length()


def shard_of_writer(writer: int, shards: int) -> int:
    """The shard that gave a client its number."""
    return writer >> writer_bits(shards)


def shard_of_block(block: int, shards: int) -> int:
    """The shard whose client wrote the block."""
    return shard_of_writer(block >> 32, shards)


def spans(request: Request) -> bool:
    """Return whether every shard has to be asked."""
    return request.covers() in (Scope.LISTING, Scope.QUEUE)


def merge_values(replies: Sequence[Any]) -> Value:
    """The answers of all shards to a command that spans them, as one."""
    values = [reply.value for reply in replies]
    if isinstance(values[0], list):
        return Value([item for value in values for item in value])
    return Value({name: item for value in values for name, item in value.items()})
