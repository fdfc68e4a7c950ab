"""Several byte strings in one buffer, and apart again.

::

    u64 count | count x (u64 offset, u64 nbytes) | payloads

Offsets count from the start of the buffer; numbers are little-endian, so a buffer may exceed 4 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from transfer_queue.columns.column import Bytes, as_bytes
from transfer_queue.errors import CorruptBlockError, InvalidInputError

__all__ = ["calc_packed_size", "pack_chunks", "pack_into", "unpack_from"]

Target: TypeAlias = "memoryview | bytearray | Bytes"
Buffer: TypeAlias = "Target | bytes"

COUNT_BYTES = 8
ENTRY_BYTES = 16


def calc_packed_size(items: Sequence[Buffer]) -> int:
    """Bytes that ``pack_into`` needs for ``items``."""
    return COUNT_BYTES + ENTRY_BYTES * len(items) + sum(as_bytes(item).nbytes for item in items)


def pack_into(target_buffer: Target, items: Sequence[Buffer]) -> None:
    """Write ``items`` to the start of ``target_buffer``; the GIL is released during large copies.

    Raises InvalidInputError if the buffer has fewer than ``calc_packed_size(items)`` bytes or is read-only.
    """
    out = as_bytes(target_buffer)
    chunks = pack_chunks([as_bytes(item) for item in items])
    needed = sum(chunk.nbytes for chunk in chunks)
    if out.nbytes < needed or not out.flags.writeable:
        raise InvalidInputError(
            f"{len(chunks) - 1} items need a writable buffer of {needed} bytes, not {out.nbytes} bytes, "
            f"{'writable' if out.flags.writeable else 'read-only'}"
        )
    position = 0
    for chunk in chunks:
        np.copyto(out[position : position + chunk.nbytes], chunk)
        position += chunk.nbytes


def pack_chunks(items: Sequence[Bytes]) -> list[Bytes]:
    """Return the table and the uncopied items that ``pack_into`` writes."""
    table = np.empty(1 + 2 * len(items), "<u8")
    table[0] = len(items)
    position = table.nbytes
    for number, item in enumerate(items):
        table[1 + 2 * number : 3 + 2 * number] = position, item.nbytes
        position += item.nbytes
    return [as_bytes(table), *items]


def unpack_from(source_buffer: Buffer) -> list[memoryview]:
    """The items of a packed buffer, as views of it.

    Raises CorruptBlockError if the count, an offset or a size does not fit the buffer.
    """
    source = as_bytes(source_buffer)
    if source.nbytes < COUNT_BYTES:
        raise CorruptBlockError(f"packed buffer of {source.nbytes} bytes: too short for its count")
    count = int.from_bytes(source[:COUNT_BYTES].tobytes(), "little")
    if count > (source.nbytes - COUNT_BYTES) // ENTRY_BYTES:
        raise CorruptBlockError(f"packed buffer of {source.nbytes} bytes cannot hold the table of {count} items")
    payload = COUNT_BYTES + ENTRY_BYTES * count
    table = source[COUNT_BYTES:payload].view("<u8").reshape(count, 2).tolist()
    items = []
    for offset, nbytes in table:
        if offset < payload or offset + nbytes > source.nbytes:
            raise CorruptBlockError(f"packed item at {offset} of {nbytes} bytes in a buffer of {source.nbytes}")
        items.append(source[offset : offset + nbytes].data)
    return items
