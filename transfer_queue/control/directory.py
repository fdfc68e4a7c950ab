"""Several controllers behind one queue: which of them has which partition, and whose a block is.

A partition lives on one shard, which a hash of its name decides (rendezvous hashing, the same in every process). So
controllers never need to agree on anything: a client that knows how many there are knows whom to ask. Partitions that
were moved are exceptions, which the controllers that they left and came to keep (`Moves`). The numbers of a queue's
writers carry the shard in their highest bits, so that a storage unit knows whose block it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.commands import Value
from transfer_queue.control.requests import Request, Scope

__all__ = [
    "Arrival",
    "Away",
    "Moves",
    "Shard",
    "block_ids",
    "merge_values",
    "shard_of",
    "shard_of_block",
    "shard_of_writer",
    "spans",
    "units_of",
    "writer_bits",
]

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


class Away(msgspec.Struct, frozen=True, array_like=True):
    """A partition has gone to the controller ``shard``, which wants to see ``proof`` before it serves it."""

    shard: int
    proof: str


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The state of a partition that ``source`` has not let go yet, as far as this controller knows."""

    seal: str
    source: int
    content: dict[str, Any]


class Moves:
    """Partitions that left a controller, that came to it, and that are being received, see
    `transfer_queue.control.moves`. Any other partition is where the hash of its name puts it."""

    def __init__(self) -> None:
        self.away: dict[str, Away] = {}
        self.here: dict[str, None] = {}
        self.arriving: dict[str, Arrival] = {}

    def leave(self, name: str, shard: int, proof: str) -> None:
        self.here.pop(name, None)
        self.away[name] = Away(shard, proof)

    def settle(self, name: str) -> None:
        """The partition has arrived."""
        self.arriving.pop(name, None)
        self.away.pop(name, None)
        self.here[name] = None

    def arrive_at(self, unit: int) -> bool:
        """Whether a partition that is being received has blocks on a storage unit."""
        return any(unit in units_of(found.content) for found in self.arriving.values())

    def clear(self) -> None:
        """Every partition is where its name puts it."""
        for table in (self.away, self.here, self.arriving):
            table.clear()

    def dump(self) -> list[Any]:
        return [
            [[name, away.shard, away.proof] for name, away in self.away.items()],
            list(self.here),
            [[name, found.seal, found.source, found.content] for name, found in self.arriving.items()],
        ]

    def load(self, data: list[Any]) -> None:
        away, here, arriving = data
        self.away.update({name: Away(shard, proof) for name, shard, proof in away})
        self.here.update(dict.fromkeys(here))
        self.arriving.update({name: Arrival(seal, source, content) for name, seal, source, content in arriving})


def units_of(content: Mapping[str, Any]) -> NDArray[np.int32]:
    """The storage unit of each block of a partition that is being received."""
    return np.frombuffer(content["blocks"]["unit"], np.int32)[1:]


def block_ids(content: Mapping[str, Any]) -> NDArray[np.uint64]:
    """The number of each block of a partition that is being received."""
    return np.frombuffer(content["blocks"]["block"], np.uint64)[1:]


def spans(request: Request) -> bool:
    """Return whether every shard has to be asked."""
    return request.covers() in (Scope.LISTING, Scope.QUEUE)


def merge_values(replies: Sequence[Any]) -> Value:
    """The answers of all shards to a command that spans them, as one."""
    values = [reply.value for reply in replies]
    if isinstance(values[0], list):
        return Value([item for value in values for item in value])
    merged: dict[str, Any] = {}
    for value in values:
        for name, item in value.items():
            merged[name] = _merged(merged[name], item) if name in merged else item
    return Value(merged)


def _merged(one: Any, other: Any) -> Any:
    """The sum of counts, and all entries of lists and dictionaries."""
    if isinstance(one, dict):
        return {**one, **other}
    return one + other if isinstance(one, int | list) else other
