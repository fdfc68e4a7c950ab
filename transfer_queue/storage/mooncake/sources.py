"""Memory from which a put is sent: a registered buffer with packed bytes, or the tensors' own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from transfer_queue.storage.mooncake.buffers import Bytes
from transfer_queue.storage.mooncake.parts import Part

__all__ = ["IN_PLACE_BYTES", "Source", "in_place", "packed"]

IN_PLACE_BYTES: Final = 1 << 20
"""Shorter pieces are packed: to register memory and to send one more piece takes as long as to copy this much."""
_PIECES: Final = 256
"""No more pieces of a put than this are sent from where they lie. The engine queues 1024 for each peer, and fails those
that then wait for longer than a second."""


@dataclass(frozen=True)
class Source:
    """The bytes of consecutive parts. All that is not in the buffer must stay unchanged until it has been sent."""

    buffer_bytes: int
    """Size of the buffer that ``fill`` and ``values`` get."""
    fill: Callable[[Bytes], None]
    """Writes into the buffer what is not sent from elsewhere."""
    values: Callable[[Bytes], dict[str, list[Bytes]]]
    """Key of a part -> its bytes as pieces, one after the other."""


def packed(parts: Sequence[Part], fill: Callable[[Bytes], None]) -> Source:
    """All of it in the buffer, each part in one piece."""
    base, stop = parts[0].start, parts[-1].stop
    return Source(
        stop - base, fill, lambda buffer: {part.key: [buffer[part.start - base : part.stop - base]] for part in parts}
    )


def in_place(parts: Sequence[Part], segments: deque[Bytes]) -> Source:
    """Long segments stay where they are, what is between them is packed. Takes what it needs off ``segments``."""
    limit = max(IN_PLACE_BYTES, (parts[-1].stop - parts[0].start) // _PIECES)
    plan: dict[str, list[Bytes | int]] = {}  # a piece where it lies, or the length of one in the buffer
    copies: list[Bytes] = []
    total = 0
    for part in parts:
        pieces: list[Bytes | int] = plan.setdefault(part.key, [])
        for segment in _cut(segments, part.nbytes):
            if segment.nbytes >= limit:
                pieces.append(segment)
                continue
            copies.append(segment)
            total += segment.nbytes
            if pieces and isinstance(pieces[-1], int):
                pieces[-1] += segment.nbytes
            else:
                pieces.append(segment.nbytes)

    def fill(buffer: Bytes) -> None:
        position = 0
        for source in copies:
            np.copyto(buffer[position : position + source.nbytes], source)
            position += source.nbytes

    def values(buffer: Bytes) -> dict[str, list[Bytes]]:
        position = 0
        found: dict[str, list[Bytes]] = {}
        for key, pieces in plan.items():
            found[key] = []
            for piece in pieces:
                if isinstance(piece, int):
                    found[key].append(buffer[position : position + piece])
                    position += piece
                else:
                    found[key].append(piece)
        return found

    return Source(total, fill, values)


def _cut(segments: deque[Bytes], nbytes: int) -> list[Bytes]:
    """Takes the first ``nbytes`` off ``segments``."""
    taken: list[Bytes] = []
    while nbytes:
        segment = segments.popleft()
        if segment.nbytes > nbytes:
            segments.appendleft(segment[nbytes:])
            segment = segment[:nbytes]
        taken.append(segment)
        nbytes -= segment.nbytes
    return taken
