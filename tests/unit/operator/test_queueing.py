"""When a queue that something happened to is looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.operator.queues import IMAGES
from tests.unit.operator.test_watched import KEY, World
from tq_operator.runtime import work_queue
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.watched import Key
from tq_operator.runtime.work_queue import WorkQueue


def test_what_was_asked_for_while_the_lease_had_run_out_is_looked_at_once_it_is_renewed() -> None:
    world, asked, leads = World(), 0, False

    def leading() -> bool:
        nonlocal asked
        asked += 1
        return leads

    reconciler = Reconciler(world.cluster, IMAGES, (), "test", leading)

    async def scene() -> None:
        nonlocal leads
        working = asyncio.create_task(reconciler.work.run())
        reconciler.work.add(KEY)
        while asked == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leads = True
        while "PATCH transferqueues/status" not in world.cluster.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        working.cancel()

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_key_that_fails_is_tried_again_once_however_often_it_was_added_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "_GATHER_S": 0.0,
        "_SPACING_S": 0.0,
        "_FIRST_RETRY_S": 1000.0,
        "_LONGEST_RETRY_S": 1000.0,
    }.items():
        monkeypatch.setattr(work_queue, name, value)  # no retry comes due here
    turns = 0

    def failing(_: Key) -> bool:
        nonlocal turns
        turns += 1
        return False

    async def scene() -> int:
        queue = WorkQueue(failing, lambda: True)
        loop, retries = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def noted(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
            handle = call_later(delay, callback, *arguments)
            if callback == queue.add:
                retries.append(handle)
            return handle

        monkeypatch.setattr(loop, "call_later", noted)
        working = asyncio.create_task(queue.run())
        for number in range(1, 6):
            queue.add(KEY)
            while len(retries) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        working.cancel()
        return sum(not handle.cancelled() for handle in retries)

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == 1
    assert turns == 5


def test_a_queue_whose_name_is_taken_is_tried_again() -> None:
    world = World()
    foreign = {"kind": "ConfigMap", "metadata": {"uid": "of-somebody-else"}}
    world.cluster.put("/api/v1/namespaces/rl/configmaps/quickstart-config", foreign)
    world.relist()
    assert not world.reconciler.reconcile(KEY)
    world.cluster.drop("/api/v1/namespaces/rl/configmaps/quickstart-config", told=False)  # it has none of our labels
    assert world.reconciler.reconcile(KEY)
