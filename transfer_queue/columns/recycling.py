"""Memory for decoded batches that is used again once the batch is gone.

The first write to fresh pages runs at a third of the speed of a copy into warm ones or less, and a consumer that takes
batch after batch would pay that each time. So large buffers whose tensors are gone are kept, up to ``RETAIN_BYTES``,
and handed out again for batches of similar size. What no batch needs for ``RETAIN_S`` is freed with the next large one.
"""

from __future__ import annotations

import weakref
from collections import deque
from time import monotonic
from typing import Final

import numpy as np

from transfer_queue.columns.column import Bytes

__all__ = ["MEMORY", "RecycledMemory", "empty_bytes"]

LARGE_BYTES: Final = 1 << 20
"""Smaller buffers come from the C library, which recycles them itself."""

RETAIN_BYTES: Final = 1 << 30
RETAIN_S: Final = 60.0


class _Idle:
    __slots__ = ("buffer", "since")

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self.since = monotonic()


class RecycledMemory:
    """Idle buffers, oldest first. Without locks, so that a buffer may be given back from any thread, at any moment a
    garbage collection picks, and after a fork: a buffer that another thread is looking at is merely missed."""

    def __init__(self, retain_bytes: int = RETAIN_BYTES) -> None:
        self._retain_bytes = retain_bytes
        self._idle: deque[_Idle] = deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for further use."""
        return sum(idle.buffer.nbytes for idle in list(self._idle))

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of writable memory with arbitrary contents; recycled when nothing refers to it any more."""
        if nbytes < LARGE_BYTES:
            return np.empty(nbytes, np.uint8)
        # Sizes are rounded up to 1/16 of their power of two: batches of nearly one size share buffers.
        step = 1 << (nbytes.bit_length() - 5)
        size = -(-nbytes // step) * step
        buffer = self._find(size)
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        # Through a memoryview: what is made of this array refers to it and not to the buffer behind it.
        lent = np.frombuffer(buffer.data, np.uint8, nbytes)
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return lent

    def _find(self, size: int) -> Bytes | None:
        """The buffer that was used last, so that those which are too many grow old."""
        for idle in reversed(list(self._idle)):
            if idle.buffer.nbytes == size:
                try:
                    self._idle.remove(idle)
                except (ValueError, IndexError):  # another thread was faster
                    continue
                return idle.buffer
        return None

    def _give_back(self, buffer: Bytes) -> None:
        self._idle.append(_Idle(buffer))
        old = monotonic() - RETAIN_S
        try:
            while self._idle[0].since < old or self.idle_bytes > self._retain_bytes:
                self._idle.popleft()
        except IndexError:  # none is left
            return


MEMORY: Final = RecycledMemory()
empty_bytes = MEMORY.take
