"""The webhook as a web application, without an apiserver."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.metrics import OperatorMetrics
from tq_operator.runtime.probes import Readiness, probe_application
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.webhook import (
    BIND_PATH,
    CONVERT_PATH,
    INJECT_PATH,
    VALIDATE_PATH,
    Certificate,
    webhook_application,
)
from transfer_queue.launch.certificates import new_authority

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


def test_a_queue_that_is_being_deleted_gets_no_more_pods() -> None:
    ending = {**QUEUE, "metadata": {**QUEUE["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    body = {"request": {"uid": "1", "namespace": "rl", "object": POD}}
    ((_, answer),) = answers(INJECT_PATH, ending, [body])
    assert answer["response"]["allowed"] is False
    assert "rl/q is being deleted" in answer["response"]["status"]["message"]


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


def test_a_replica_that_leaves_is_not_ready(tmp_path: Path) -> None:
    pair = new_authority("test", datetime.now(timezone.utc), timedelta(days=1))
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)

    async def answer() -> tuple[int, str]:
        reconciler, leaving = Reconciler(MemoryCluster(), IMAGES, (), "test"), asyncio.Event()
        leaving.set()
        application = probe_application(reconciler, Readiness(reconciler, 60, Certificate(tmp_path), None), leaving)
        async with TestClient(TestServer(application)) as client, client.get("/readyz") as found:
            return found.status, await found.text()

    assert asyncio.run(answer()) == (503, "this replica ends\n")


GARBAGE: list[Any] = [None, True, 5, "text", [], ["text"], [None], [[]], {}, {"name": ["text"]}]
LABEL = {"transferqueue.io/inject": "q"}
WHOLE_POD = {
    "metadata": {"labels": {**LABEL, "app": "x"}, "annotations": {"transferqueue.io/keep-env": "A"}},
    "spec": {
        "initContainers": [{"name": "first", "image": "t:1"}],
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "A", "value": "1"}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "claims": [{"name": "c"}]},
                "securityContext": {"capabilities": {"add": ["SYS_NICE"]}},
            }
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}],
    },
}
RDMA = {"resourceName": "rdma/a"}, {"claim": {"deviceClassName": "a.example"}}


def everywhere(document: Any, garbage: Any) -> Iterator[Any]:
    """``document`` with ``garbage`` in one place each time."""
    yield garbage
    places = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for place, value in places:
        for changed in everywhere(value, garbage):
            copied = dict(document) if isinstance(document, dict) else list(document)
            copied[place] = changed
            yield copied


def queues() -> Iterator[Manifest]:
    yield QUEUE
    for rdma in RDMA:
        yield {**QUEUE, "spec": {"backend": {"mooncake": {}}, "rdma": rdma}, "status": {"transport": "rdma"}}


def answers(path: str, queue: Manifest, bodies: Iterable[Any]) -> list[tuple[int, Any]]:
    binding = {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueueBinding",
        "metadata": {"name": "b", "namespace": "rl"},
        "spec": {"queue": {"name": "q", "namespace": "rl"}, "selector": {"matchLabels": {"app": "x"}}},
    }

    async def post() -> list[tuple[int, Any]]:
        application = webhook_application({("rl", "q"): queue}, lambda *_: None, lambda _: [binding], OperatorMetrics())
        async with TestClient(TestServer(application)) as client:
            found = []
            for body in bodies:
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await client.post(path, data=BytesIO(text))
                found.append((answer.status, json.loads(await answer.text()) if answer.status == 200 else None))
            return found

    return asyncio.run(post())


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("path", [INJECT_PATH, BIND_PATH])
def test_a_pod_with_garbage_in_any_place_is_let_in_or_refused_in_words(path: str, garbage: Any) -> None:
    given = WHOLE_POD if path == INJECT_PATH else {**WHOLE_POD, "metadata": {"labels": {"app": "x"}}}
    bodies = [{"request": {"uid": "1", "namespace": "rl", "object": pod}} for pod in everywhere(given, garbage)]
    for queue in queues():
        for body, (status, answer) in zip(bodies, answers(path, queue, bodies), strict=True):
            assert status in (200, 400), body
            if status == 200 and not answer["response"]["allowed"]:
                assert answer["response"]["status"]["message"]


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
def test_a_queue_with_garbage_in_any_place_is_let_in_or_refused_in_words(garbage: Any) -> None:
    whole = {
        **QUEUE,
        "spec": {
            "backend": {"simple": {"numUnits": 2}},
            "storage": {"replicas": 3, "capacity": "1Gi", "tolerations": [{"key": "a"}]},
            "security": {"tls": {"mode": "off"}},
        },
        "status": {"transport": "tcp", "tls": "off", "storage": {"used": "1Gi"}},
    }
    smaller = {**whole, "spec": {"backend": {"simple": {}}, "storage": {"replicas": 1}}}
    bodies = [{"request": {"uid": "1", "namespace": "rl", "object": found}} for found in everywhere(whole, garbage)]
    bodies += [
        {"request": {"uid": "1", "namespace": "rl", "object": smaller, "oldObject": found}}
        for found in everywhere(whole, garbage)
    ]
    for body, (status, _) in zip(bodies, answers(VALIDATE_PATH, QUEUE, bodies), strict=True):
        assert status in (200, 400), body


@pytest.mark.parametrize("path", [INJECT_PATH, BIND_PATH, VALIDATE_PATH, CONVERT_PATH])
def test_a_body_that_is_no_review_is_refused(path: str) -> None:
    bodies = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"5",
        b'{"request": {"uid": "1", "object": [], "objects": 1}}',
    ]
    assert [status for status, _ in answers(path, QUEUE, bodies)] == [400] * len(bodies)


def test_a_pod_of_a_megabyte_is_injected() -> None:
    entries = [{"name": f"V{number}", "value": "x" * 100} for number in range(8_000)]
    large = {**POD, "spec": {"containers": [{"name": "trainer", "image": "t:1", "env": entries}]}}
    body = {"request": {"uid": "1", "namespace": "rl", "object": large}}
    assert len(json.dumps(body)) > 1_000_000
    ((status, answer),) = answers(INJECT_PATH, QUEUE, [body])
    assert status == 200
    assert answer["response"]["allowed"]
    operations = json.loads(base64.b64decode(answer["response"]["patch"]))
    (container,) = [each["value"] for each in operations if each["path"] == "/spec/containers/0"]
    assert container["env"][-8_000:] == entries
