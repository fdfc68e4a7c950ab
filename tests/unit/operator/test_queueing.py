"""When a queue that something happened to is looked at."""

from __future__ import annotations

import asyncio

from tests.unit.operator.queues import IMAGES
from tests.unit.operator.test_watched import KEY, World
from tq_operator.runtime.reconciler import Reconciler


def test_what_was_asked_for_while_the_lease_had_run_out_is_looked_at_once_it_is_renewed() -> None:
    world, asked, leads = World(), 0, False

    def leading() -> bool:
        nonlocal asked
        asked += 1
        return leads

    reconciler = Reconciler(world.cluster, IMAGES, (), "test", leading)

    async def scene() -> None:
        nonlocal leads
        working = asyncio.create_task(reconciler.run())
        reconciler.request(KEY)
        while asked == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leads = True
        while "PATCH transferqueues/status" not in world.cluster.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        working.cancel()

    asyncio.run(asyncio.wait_for(scene(), 20))
