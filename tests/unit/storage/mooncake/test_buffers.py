"""How long batches may keep the buffers that they were received into."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer_queue.storage.mooncake.buffers import Lease, RegisteredPool

MIB = 1 << 20


async def _run(job: Callable[[], None]) -> None:
    job()


async def _leases(pinned: bool) -> list[bool]:
    """Whether batches may keep each of four leases of 64 MiB of a pool of 256."""
    pool = RegisteredPool(256 * MIB, lambda *_: None, lambda *_: None, _run, pinned=pinned)
    deadline = asyncio.get_running_loop().time() + 60
    leases: list[Lease] = [await pool.take(64 * MIB, deadline) for _ in range(4)]
    kept = [lease.keep() for lease in leases]
    leases[0].release()
    return [*kept, leases[3].keep(), leases[3].keep()]


def test_batches_keep_half_of_the_buffers() -> None:
    assert asyncio.run(_leases(pinned=False)) == [True, True, False, False, True, True]


def test_batches_keep_nothing_that_a_forked_child_lacks() -> None:
    assert not any(asyncio.run(_leases(pinned=True)))
