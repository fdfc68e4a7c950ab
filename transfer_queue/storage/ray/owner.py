"""The actor that owns the blocks of one storage unit."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

__all__ = ["BlockOwner"]

_CALLS = 10_000
"""Calls that may be open at once: writers wait here for space."""


class _BlockOwner:
    """Holds references to blocks, which keep the objects alive, and small blocks themselves."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: bytes of all blocks together."""
        self._capacity = capacity
        self._used = 0
        self._sizes: dict[int, int] = {}
        self._contents: dict[int, Any] = {}
        self._waiting: set[int] = set()
        self._changed = asyncio.Event()

    async def reserve(self, block: int, nbytes: int, wait_s: float) -> bool:
        """Set space for a block aside; False if there is none within ``wait_s`` seconds, or the block was freed."""
        if block in self._sizes:  # asked twice
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        self._waiting.add(block)
        while block in self._waiting:
            if self._used + nbytes <= self._capacity:
                self._waiting.discard(block)
                self._sizes[block] = nbytes
                self._used += nbytes
                return True
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                self._waiting.discard(block)
        return False

    async def keep(self, block: int, nbytes: int, content: Any, wait_s: float) -> bool:
        """Hold a block, given as ``bytes`` or as an array, which becomes an object. False as in :meth:`reserve`.

        The array is an object of the writer's and goes with it; the copy is this actor's.
        """
        if block in self._contents:  # the first of two wins
            return True
        if not await self.reserve(block, nbytes, wait_s):
            return False
        held = content if isinstance(content, bytes) else [await asyncio.to_thread(ray.put, content)]
        if block not in self._sizes:
            return False
        self._contents[block] = held
        return True

    async def contents(self, blocks: list[int]) -> list[Any]:
        """The bytes of each block or a list of the one reference to them; None for blocks that are not held."""
        return [self._contents.get(block) for block in blocks]

    async def free(self, blocks: list[int]) -> None:
        """Let go of blocks; unknown ones are ignored. Objects that are being read stay until the reader is done."""
        for block in blocks:
            self._waiting.discard(block)
            self._contents.pop(block, None)
            self._used -= self._sizes.pop(block, 0)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def held(self) -> list[int]:
        """Blocks that are held or have space set aside."""
        return list(self._sizes)

    async def usage(self) -> tuple[int, int]:
        """(bytes, blocks)."""
        return self._used, len(self._sizes)


BlockOwner: Any = ray.remote(num_cpus=0, max_concurrency=_CALLS)(_BlockOwner)
