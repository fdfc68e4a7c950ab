"""Which bytes of a block a reader needs, where the engine can read ranges of a value.

A block begins with a header that says where its columns lie. It is read first, then the wanted columns to their places
in a buffer of the block's size; what lies between them stays as it was and is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from transfer_queue.columns.block import BlockView
from transfer_queue.errors import CorruptBlockError
from transfer_queue.storage.base import BlockRead
from transfer_queue.storage.mooncake.buffers import Bytes
from transfer_queue.storage.mooncake.parts import Part

__all__ = ["HEADER_BYTES", "SMALLEST_BLOCK", "Range", "is_partial", "overlaps", "wanted_ranges"]

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
    """What of ``ranges`` lies in ``part``, counted from its start."""
    found = ((max(start, part.start), min(stop, part.stop)) for start, stop in ranges)
    return [(start - part.start, stop - part.start) for start, stop in found if start < stop]
