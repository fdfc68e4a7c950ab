"""Where the small blocks of an arena lie, in the arena itself: clients of the same host read them without a message.

A reader copies the block and then looks whether its entry is still there. The unit removes the entry before it uses the
memory again, and block numbers are never reused, so the copy is right if the entry is. On processors that may reorder
loads (all but x86) this proves nothing, and there is no table.

An entry is four u64: block (0: free), offset, bytes, unused. A block is in one of a few slots that its number tells.
If all of them are taken, the block is not entered, and is read with a message.
"""

from __future__ import annotations

import platform
from typing import Final

__all__ = ["ENTRY_BYTES", "SharedBlockTable", "table_bytes"]

ENTRY_BYTES: Final = 32
_WORDS: Final = ENTRY_BYTES // 8
_WINDOW: Final = 4
_LEAST, _MOST = 1 << 10, 1 << 16
_BYTES_PER_ENTRY: Final = 4096
_SPREAD: Final = 0x9E37_79B1


def table_bytes(capacity: int) -> int:
    """Bytes of the table for an arena of ``capacity`` bytes; 0 where there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0
    slots = min(max(capacity // _BYTES_PER_ENTRY, _LEAST), _MOST)
    return ENTRY_BYTES << (slots.bit_length() - 1)


class SharedBlockTable:
    """The table in ``memory``, whose entries are a power of two. Only the unit writes it."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("B").cast("Q")
        self._mask = len(self._words) // _WORDS - 1

    def enter(self, block: int, offset: int, nbytes: int) -> None:
        """Make the block readable through the table."""
        words = self._words
        for at in self._slots(block):
            if words[at] == 0:
                words[at + 1], words[at + 2] = offset, nbytes
                words[at] = block  # last: who sees it reads the rest
                return

    def remove(self, block: int) -> None:
        """To be called before the memory of the block is used again."""
        words = self._words
        for at in self._slots(block):
            if words[at] == block:
                words[at] = 0

    def find(self, block: int) -> tuple[int, int] | None:
        """(offset, bytes) of a block that is entered."""
        words = self._words
        for at in self._slots(block):
            if words[at] == block:
                return words[at + 1], words[at + 2]
        return None

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()

    def _slots(self, block: int) -> list[int]:
        first = block + (block >> 32) * _SPREAD
        return [(first + step & self._mask) * _WORDS for step in range(_WINDOW)]
