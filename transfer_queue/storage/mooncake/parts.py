"""Layout of a block in the store: its keys, and the byte ranges of them that a reader needs.

A block has the key ``tq/<run>/<block>``, or ``tq/<run>/<block>/<k>`` for the parts of a long block. Where the engine
can read ranges of a value, a reader reads the block's header first, which says where the columns lie, and then the
columns that it needs, to their places in a buffer of the block's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from transfer_queue.columns.block import BlockView
from transfer_queue.errors import CorruptBlockError
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.mooncake.buffers import Bytes

__all__ = [
    "HEADER_BYTES",
    "SMALLEST_BLOCK",
    "Part",
    "Range",
    "block_key",
    "block_of",
    "in_batches",
    "in_groups",
    "is_partial",
    "overlaps",
    "parts_of",
    "prefix_of",
    "wanted_ranges",
]


class Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of a block under one key."""

    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def prefix_of(run: str) -> str:
    """Return the common prefix of the keys of a run. A shared master holds other keys as well."""
    return f"tq/{run}/"


def block_key(run: str, block: int) -> str:
    return f"tq/{run}/{block}"


def parts_of(run: str, block: int, nbytes: int, part_bytes: int) -> list[Part]:
    """Return the keys of a block of ``nbytes``: one key if it is no longer than ``part_bytes``."""
    key = block_key(run, block)
    if nbytes <= part_bytes:
        return [Part(key, 0, nbytes)]
    starts = range(0, nbytes, part_bytes)
    return [Part(f"{key}/{k}", start, min(start + part_bytes, nbytes)) for k, start in enumerate(starts)]


def block_of(keys: Iterable[str], run: str) -> dict[str, int]:
    """key -> block, for those of ``keys`` that are blocks or parts of blocks of ``run``."""
    prefix = prefix_of(run)
    found = {}
    for key in keys:
        name = key.removeprefix(prefix).partition("/")[0]
        if key.startswith(prefix) and name.isascii() and name.isdigit():
            found[key] = int(name)
    return found


Range = tuple[int, int]
"""First byte and the byte after the last, within a block."""

HEADER_BYTES: Final = 4096
"""Read first; blocks with longer headers are read whole."""
SMALLEST_BLOCK: Final = 4 << 20
"""Shorter blocks are read whole: a second call of the engine takes as long as that."""
_GAP: Final = 64 << 10
"""Ranges closer to each other are read in one piece."""


def is_partial(reads: Iterable[BlockRead]) -> bool:
    """Whether none of these reads of one block asks for all of its fields by leaving them open."""
    return all(read.fields is not None for read in reads)


def wanted_ranges(block: Bytes, reads: Sequence[BlockRead]) -> list[Range] | None:
    """Ranges of ``block``, whose first HEADER_BYTES are there, that ``reads`` need, ascending, with gaps between.

    None: read it whole, as the header is longer or most of it is wanted. Raises CorruptBlockError,
    StorageKeyNotFoundError for a field that it does not have.
    """
    size = int.from_bytes(block[4:8].tobytes(), "little")
    if 8 + size > HEADER_BYTES:
        return None
    view = BlockView(block)
    if view.nbytes > block.nbytes:
        raise CorruptBlockError(f"block of {view.nbytes} bytes where {block.nbytes} were stored")
    found = sorted(place for read in reads for name in read.fields or () for place in view.places(name, read.rows))
    merged = [(0, HEADER_BYTES)]
    for start, stop in found:
        if start <= merged[-1][1] + _GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged if 2 * sum(stop - start for start, stop in merged) <= block.nbytes else None


def overlaps(part: Part, ranges: Iterable[Range]) -> list[Range]:
    """Return the parts of ``ranges`` that lie in ``part``, counted from its start."""
    found = ((max(start, part.start), min(stop, part.stop)) for start, stop in ranges)
    return [(start - part.start, stop - part.start) for start, stop in found if start < stop]


def in_groups(parts: list[Part], nbytes: int) -> Iterator[list[Part]]:
    """Consecutive parts, together no longer than ``nbytes`` or a single one."""
    for group in in_batches([(part, 0) for part in parts], nbytes):
        yield [part for part, _ in group]


def in_batches(parts: list[tuple[Part, int]], nbytes: int) -> Iterator[list[tuple[Part, int]]]:
    """The same for parts with their starts."""
    batch: list[tuple[Part, int]] = []
    total = 0
    for item in parts:
        if batch and total + item[0].nbytes > nbytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += item[0].nbytes
    if batch:
        yield batch
