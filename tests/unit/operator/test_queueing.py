"""When a queue that something happened to is looked at."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.unit.operator.queues import IMAGES
from tests.unit.operator.test_watched import KEY, World
from tq_operator.runtime import reconciler as module
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


def test_a_queue_that_fails_is_tried_again_once_however_often_it_was_looked_at_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_GATHER_S", 0.0)
    monkeypatch.setattr(module, "_SPACING_S", 0.0)
    monkeypatch.setattr(random, "uniform", lambda *_: 1000.0)  # no retry comes due here
    reconciler, looks = Reconciler(World().cluster, IMAGES, (), "test"), 0

    def failing(_: Any) -> bool:
        nonlocal looks
        looks += 1
        return False

    monkeypatch.setattr(reconciler, "reconcile", failing)

    async def scene() -> int:
        loop, retries = asyncio.get_running_loop(), []
        call_later = loop.call_later

        def noted(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
            handle = call_later(delay, callback, *arguments)
            if callback == reconciler.request:
                retries.append(handle)
            return handle

        monkeypatch.setattr(loop, "call_later", noted)
        working = asyncio.create_task(reconciler.run())
        for number in range(1, 6):
            reconciler.request(KEY)
            while len(retries) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        working.cancel()
        return sum(not handle.cancelled() for handle in retries)

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == 1
    assert looks == 5


def test_a_queue_whose_name_is_taken_is_tried_again() -> None:
    world = World()
    foreign = {"kind": "ConfigMap", "metadata": {"uid": "of-somebody-else"}}
    world.cluster.put("/api/v1/namespaces/rl/configmaps/quickstart-config", foreign)
    world.relist()
    assert not world.reconciler.reconcile(KEY)
    world.cluster.drop("/api/v1/namespaces/rl/configmaps/quickstart-config", told=False)  # it has none of our labels
    assert world.reconciler.reconcile(KEY)
