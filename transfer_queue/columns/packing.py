"""Several byte strings in one buffer, and apart again.

::

    u64 count | count x (u64 offset, u64 nbytes) | payloads

Offsets count from the start of the buffer; numbers are little-endian, so a buffer may exceed 4 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from transfer_queue.columns.column import Bytes, as_bytes
from transfer_queue.errors import CorruptBlockError, InvalidInputError

__all__ = ["calc_packed_size", "pack_into", "pack_table", "unpack_from"]

Target: TypeAlias = "memoryview | bytearray | Bytes"
Buffer: TypeAlias = "Target | bytes"

COUNT_BYTES = 8
ENTRY_BYTES = 16
_ENTRY = struct.Struct("<QQ")


def calc_packed_size(items: Sequence[Buffer]) -> int:
    """Bytes that ``pack_into`` needs for ``items``."""
    return COUNT_BYTES + ENTRY_BYTES * len(items) + sum(as_bytes(item).nbytes for item in items)


def pack_into(target_buffer: Target, items: Sequence[Buffer]) -> None:
    """Write ``items`` to the start of ``target_buffer``; the GIL is released during large copies.

    Raises InvalidInputError if the buffer has fewer than ``calc_packed_size(items)`` bytes or is read-only.
    """
    out = as_bytes(target_buffer)
    chunks = [as_bytes(item) for item in items]
    chunks.insert(0, as_bytes(pack_table([chunk.nbytes for chunk in chunks])))
    needed = sum(chunk.nbytes for chunk in chunks)
    if out.nbytes < needed or not out.flags.writeable:
        raise InvalidInputError(
            f"{len(items)} items need a writable buffer of {needed} bytes, not {out.nbytes} bytes, "
            f"{'writable' if out.flags.writeable else 'read-only'}"
        )
    position = 0
    for chunk in chunks:
        np.copyto(out[position : position + chunk.nbytes], chunk)
        position += chunk.nbytes


def pack_table(sizes: Sequence[int]) -> bytes:
    """Count, offsets and sizes of items of so many bytes, which follow."""
    entries = [len(sizes)]
    position = COUNT_BYTES + ENTRY_BYTES * len(sizes)
    for size in sizes:
        entries += position, size
        position += size
    return struct.pack(f"<{len(entries)}Q", *entries)


def unpack_from(source_buffer: Buffer) -> list[memoryview]:
    """The items of a packed buffer, as views of it.

    Raises CorruptBlockError if the count, an offset or a size does not fit the buffer.
    """
    source = as_bytes(source_buffer).data
    if source.nbytes < COUNT_BYTES:
        raise CorruptBlockError(f"packed buffer of {source.nbytes} bytes: too short for its count")
    count = int.from_bytes(source[:COUNT_BYTES], "little")
    if count > (source.nbytes - COUNT_BYTES) // ENTRY_BYTES:
        raise CorruptBlockError(f"packed buffer of {source.nbytes} bytes cannot hold the table of {count} items")
    payload = COUNT_BYTES + ENTRY_BYTES * count
    items = []
    for offset, nbytes in _ENTRY.iter_unpack(source[COUNT_BYTES:payload]):
        if offset < payload or offset + nbytes > source.nbytes:
            raise CorruptBlockError(f"packed item at {offset} of {nbytes} bytes in a buffer of {source.nbytes}")
        items.append(source[offset : offset + nbytes])
    return items
