"""The webhook as a web application, without an apiserver."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from tq_operator.plan.queue import Manifest
from tq_operator.runtime.metrics import OperatorMetrics
from tq_operator.runtime.webhook import INJECT_PATH, webhook_application

QUEUE: Manifest = {
    "apiVersion": "transferqueue.io/v1alpha1",
    "kind": "TransferQueue",
    "metadata": {"name": "q", "namespace": "rl", "uid": "u"},
    "spec": {"backend": {"simple": {}}},
}
POD = {
    "metadata": {"labels": {"transferqueue.io/inject": "q"}},
    "spec": {"containers": [{"name": "trainer", "image": "t:1"}]},
}


def review(known: dict[tuple[str, str], Manifest]) -> tuple[bool, list[str]]:
    """Whether the pod was let in, and which queues were looked up."""
    asked: list[str] = []

    def find_queue(namespace: str, name: str) -> Manifest | None:
        asked.append(f"{namespace}/{name}")
        return QUEUE

    async def post() -> dict[str, Any]:
        application = webhook_application(known, find_queue, lambda _: [], OperatorMetrics())
        async with TestClient(TestServer(application)) as client:
            body = {"request": {"uid": "1", "namespace": "rl", "object": POD}}
            answer: dict[str, Any] = await (await client.post(INJECT_PATH, json=body)).json()
            return answer

    return bool(asyncio.run(post())["response"]["allowed"]), asked


def test_a_known_queue_is_injected_without_asking_the_apiserver_and_a_new_one_is_looked_up() -> None:
    assert review({("rl", "q"): QUEUE}) == (True, [])
    assert review({}) == (True, ["rl/q"])


def test_a_replica_that_leaves_closes_each_connection_with_its_next_answer() -> None:
    answers = iter((False, True))

    async def closed() -> list[bool]:
        known = {("rl", "q"): QUEUE}
        application = webhook_application(
            known, lambda *_: None, lambda _: [], OperatorMetrics(), leaving=lambda: next(answers)
        )
        found = []
        async with TestClient(TestServer(application)) as client:
            body = {"request": {"uid": "1", "namespace": "rl", "object": POD}}
            for _ in range(2):
                answer = await client.post(INJECT_PATH, json=body)
                assert (await answer.json())["response"]["allowed"]
                found.append(answer.headers.get("Connection") == "close")
        return found

    assert asyncio.run(closed()) == [False, True]
