"""Who waits for space gets it in the order of arrival, whatever the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from transfer_queue.errors import CapacityError, RequestError
from transfer_queue.storage.space import SpaceQueue


class Space:
    """So many bytes, and what was taken in order."""

    def __init__(self, nbytes: int) -> None:
        self.free = nbytes
        self.taken: list[int] = []

    def take(self, nbytes: int) -> Callable[[], int | None]:
        def attempt() -> int | None:
            if nbytes > self.free:
                return None
            self.free -= nbytes
            self.taken.append(nbytes)
            return nbytes

        return attempt


async def test_a_later_request_that_would_fit_waits_behind_an_earlier_one() -> None:
    space, queue = Space(10), SpaceQueue[int]()
    large = queue.enter("a", 1, space.take(100), "no capacity")
    assert queue.attempt(space.take(5)) is None
    small = queue.enter("b", 2, space.take(5), "no capacity")
    queue.serve()
    assert space.taken == []
    space.free = 105
    queue.serve()
    assert [await queue.wait(large, 0.0), await queue.wait(small, 0.0)] == [100, 5]
    assert space.taken == [100, 5]


async def test_one_that_gives_up_lets_those_behind_it_pass() -> None:
    space, queue = Space(10), SpaceQueue[int]()
    large = queue.enter("a", 1, space.take(100), "no capacity")
    others = [queue.enter("b", block, space.take(5), "no capacity") for block in (2, 3)]
    assert await queue.wait(large, 0.01) is None
    assert space.taken == [5, 5]
    assert [await queue.wait(each, 0.0) for each in others] == [5, 5]


async def test_withdrawn_blocks_and_those_of_a_lost_peer_take_nothing() -> None:
    space, queue = Space(0), SpaceQueue[int]()
    withdrawn = queue.enter("a", 1, space.take(5), "no capacity")
    lost = asyncio.ensure_future(queue.wait(queue.enter("b", 2, space.take(5), "no capacity"), 600.0))
    kept = queue.enter("a", 3, space.take(5), "no capacity")
    await asyncio.sleep(0)
    queue.withdraw([1, 99])
    queue.leave("b")
    space.free = 15
    queue.serve()
    with pytest.raises(RequestError, match="0x1 was given up"):
        await queue.wait(withdrawn, 600.0)
    with pytest.raises(RequestError, match="0x2 waits for space no longer: its writer is gone"):
        await lost
    assert await queue.wait(kept, 600.0) == 5
    assert space.free == 10


async def test_one_peer_has_a_bounded_number_of_requests_in_the_queue() -> None:
    space, queue = Space(0), SpaceQueue[int](most_per_peer=2)
    first = queue.enter("a", 1, space.take(5), "no capacity")
    queue.enter("a", 2, space.take(5), "no capacity")
    with pytest.raises(CapacityError, match="no capacity: 2 puts of this client wait"):
        queue.enter("a", 3, space.take(5), "no capacity")
    queue.enter("b", 4, space.take(5), "no capacity")
    assert await queue.wait(first, 0.0) is None
    queue.enter("a", 3, space.take(5), "no capacity")
    assert len(queue) == 3
