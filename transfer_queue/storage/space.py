"""The queue of those who wait for space in a storage unit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from transfer_queue.errors import CapacityError, RequestError, TransferQueueError

__all__ = ["SpaceQueue", "SpaceRequest"]

T = TypeVar("T")

_MOST_PER_PEER = 64


class SpaceRequest(Generic[T]):
    """One block that waits for space. ``granted`` is what its attempt returned, None until then."""

    def __init__(self, peer: object, block: int, attempt: Callable[[], T | None]) -> None:
        self.peer = peer
        self.block = block
        self.attempt = attempt
        self.granted: T | None = None
        self.error: TransferQueueError | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SpaceQueue(Generic[T]):
    """Gives out space first come, first served: small blocks may not starve a large one. On one event loop only.

    An attempt takes the space and returns what it took, or None if there is too little. It may raise a
    TransferQueueError. It runs when the request is at the head of the queue and space became free.

    Args:
        most_per_peer: Number of requests of one peer that may wait.
    """

    def __init__(self, most_per_peer: int = _MOST_PER_PEER) -> None:
        self._most = most_per_peer
        self._requests: dict[SpaceRequest[T], None] = {}
        self._waiting: Counter[Any] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def attempt(self, attempt: Callable[[], T | None]) -> T | None:
        """Take space now. None if there is too little, or others have been waiting for longer."""
        return None if self._requests else attempt()

    def enter(self, peer: object, block: int, attempt: Callable[[], T | None], problem: str) -> SpaceRequest[T]:
        """Queue up. Raises CapacityError, which begins with ``problem``, if the peer has too many requests here."""
        if self._waiting[peer] >= self._most:
            raise CapacityError(f"{problem}: {self._most} puts of this client wait for space already")
        request = SpaceRequest(peer, block, attempt)
        self._requests[request] = None
        self._waiting[peer] += 1
        return request

    async def wait(self, request: SpaceRequest[T], wait_s: float) -> T | None:
        """Wait up to ``wait_s`` seconds for a queued request, and leave the queue. None: there was too little space.

        Raises RequestError if the block was withdrawn or its peer left, and what the attempt raises.
        """
        try:
            if wait_s > 0:
                await asyncio.wait([request.settled], timeout=wait_s)  # wait_for may lose space that comes at its end
        finally:
            if request in self._requests:
                self._remove(request)
                self.serve()
        if request.error is not None:
            raise request.error
        return request.granted

    def serve(self) -> None:
        """Space may have become free: grant requests in order, up to the first that gets none."""
        while self._requests:
            request = next(iter(self._requests))
            try:
                request.granted = request.attempt()
            except TransferQueueError as error:
                request.error = error
            if request.granted is None and request.error is None:
                return
            self._remove(request)
            request.settled.set_result(None)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Refuse the requests for these blocks: their writers gave them up."""
        given_up = set(blocks)
        self._refuse(
            [each for each in self._requests if each.block in given_up], "was given up while it waited for space"
        )

    def leave(self, peer: object) -> None:
        """Refuse all requests of a peer that is gone."""
        self._refuse(
            [each for each in self._requests if each.peer == peer], "waits for space no longer: its writer is gone"
        )

    def _refuse(self, requests: list[SpaceRequest[T]], reason: str) -> None:
        for request in requests:
            self._remove(request)
            request.error = RequestError(f"block {request.block:#x} {reason}")
            request.settled.set_result(None)
        if requests:
            self.serve()

    def _remove(self, request: SpaceRequest[T]) -> None:
        del self._requests[request]
        self._waiting[request.peer] -= 1
        if not self._waiting[request.peer]:
            del self._waiting[request.peer]
