"""The actor that owns the blocks of one storage unit."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from transfer_queue.errors import TransferQueueError
from transfer_queue.storage.ray.transports import Transport, put_value, ready, value_of
from transfer_queue.storage.space import SpaceQueue

__all__ = ["BlockOwner", "DirectOwner"]

_READ_S = 600.0
_CALLS = 10_000
"""Calls that may be open at once: writers wait here for space."""


class _BlockOwner:
    """Holds references to blocks, which keep the objects alive, and small blocks themselves."""

    def __init__(self, capacity: int, transport: Transport = "object_store") -> None:
        """``capacity``: bytes of all blocks together."""
        ready(transport)
        self._transport = transport
        self._capacity = capacity
        self._used = 0
        self._sizes: dict[int, int] = {}
        self._contents: dict[int, Any] = {}
        self._space: SpaceQueue[int] = SpaceQueue()

    async def reserve(self, block: int, nbytes: int, wait_s: float) -> bool:
        """Set space for a block aside.

        Returns False if there is none within ``wait_s`` seconds, if the writer has too many blocks that wait already,
        or if the block was freed.
        """
        if block in self._sizes:  # asked twice
            return True

        def attempt() -> int | None:
            if block not in self._sizes:
                if self._used + nbytes > self._capacity:
                    return None
                self._sizes[block] = nbytes
                self._used += nbytes
            return nbytes

        try:
            taken = self._space.attempt(attempt)
            if taken is None:
                taken = await self._space.wait(self._space.enter(block >> 32, block, attempt, "no capacity"), wait_s)
        except TransferQueueError:
            return False
        return taken is not None

    async def keep(self, block: int, nbytes: int, content: Any, wait_s: float) -> bool:
        """Hold a block, given as ``bytes``, as an array or as a list of a reference to one, which becomes an object.
        False as in :meth:`reserve`.

        The array is an object of the writer's and goes with it; the copy is this actor's.
        """
        if block in self._contents:  # the first of two wins
            return True
        if not await self.reserve(block, nbytes, wait_s):
            return False
        held = content if isinstance(content, bytes) else [await asyncio.to_thread(self._own, content)]
        if block not in self._sizes:
            return False
        self._contents[block] = held
        return True

    def _own(self, content: Any) -> Any:
        array = value_of(content[0], _READ_S) if isinstance(content, list) else content
        return put_value(array, self._transport)

    async def contents(self, blocks: list[int]) -> list[Any]:
        """The bytes of each block or a list of the one reference to them; None for blocks that are not held."""
        return [self._contents.get(block) for block in blocks]

    async def free(self, blocks: list[int]) -> None:
        """Let go of blocks; unknown ones are ignored. Objects that are being read stay until the reader is done."""
        self._space.withdraw(blocks)
        for block in blocks:
            self._contents.pop(block, None)
            self._used -= self._sizes.pop(block, 0)
        self._space.serve()

    async def held(self) -> list[int]:
        """Blocks that are held or have space set aside."""
        return list(self._sizes)

    async def usage(self) -> tuple[int, int]:
        """(bytes, blocks)."""
        return self._used, len(self._sizes)


BlockOwner: Any = ray.remote(num_cpus=0, max_concurrency=_CALLS)(_BlockOwner)
DirectOwner: Any = ray.remote(num_cpus=0, max_concurrency=_CALLS, enable_tensor_transport=True)(_BlockOwner)
"""For blocks that go by a tensor transport."""
