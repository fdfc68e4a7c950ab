"""The bytes of stored blocks: into their pieces, and the parts of them that readers want."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.errors import RequestError, TransferQueueError
from transfer_queue.wire import messages as wire

__all__ = ["scatter", "select_part"]


def scatter(data: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy ``data`` into the pieces, one after the other."""
    start = 0
    for piece in pieces:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)


def select_part(data: memoryview, part: wire.ReadPart) -> tuple[list[memoryview], int]:
    """Return the bytes of a block to send, as segments, and their total size."""
    if part.fields is None and part.rows is None:
        return [data], len(data)
    selected = _select(data, part)
    return selected.segments(), selected.nbytes


def _select(data: memoryview, part: wire.ReadPart) -> EncodedBlock:
    rows = np.frombuffer(part.rows, dtype="<i4").astype(np.int64) if isinstance(part.rows, bytes) else part.rows
    try:
        return BlockView(data).select(part.fields, rows)
    except TransferQueueError:
        raise
    except ValueError as error:
        raise RequestError(f"block {part.block:#x}: {error}") from None
