"""Bindings and missed pods: what fails for one does not keep the others waiting, and is tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import NotFoundError

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES
from tq_operator.runtime.bindings import Attachments
from tq_operator.runtime.cluster import ClusterError
from tq_operator.runtime.metrics import OperatorMetrics
from tq_operator.runtime.reconciler import Reconciler

BINDINGS = "/apis/transferqueue.io/v1alpha1/namespaces/jobs/transferqueuebindings"


class Refusing(MemoryCluster):
    """Refuses writes to paths with one of the ``words``, and reads while the ``definitions`` are not served."""

    words: tuple[str, ...] = ()
    definitions = True
    written: list[str]

    def call(self, method: str, path: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        if not self.definitions and "transferqueue.io" in path:
            raise NotFoundError(ApiException(status=404, reason="Not Found"))  # type: ignore[no-untyped-call]
        if method != "GET":
            if any(word in path for word in self.words):
                raise ClusterError("refused")
            self.written.append(path.rpartition("namespaces/jobs/")[2])
        return super().call(method, path, *arguments, **options)


@pytest.fixture
def cluster() -> Refusing:
    made = Refusing()
    made.written = []
    for name in ("a", "b"):
        spec = {"queue": {"name": "q", "namespace": "rl"}, "selector": {"matchLabels": {"app": name}}}
        made.put(f"{BINDINGS}/{name}", {"metadata": {}, "spec": spec})
        metadata = {"labels": {"transferqueue.io/inject": "q"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
        made.put(f"/api/v1/namespaces/jobs/pods/{name}", {"metadata": metadata})
    return made


def attachments(cluster: Refusing, leading: Any = lambda: True) -> Attachments:
    return Attachments(cluster, (), "test", leading, OperatorMetrics())


def test_a_binding_whose_status_is_refused_does_not_keep_the_others_waiting(cluster: Refusing) -> None:
    cluster.words = ("bindings/a/",)
    attachments(cluster).look()
    assert cluster.written == ["transferqueuebindings/b/status", "events", "events"]


def test_an_event_that_could_not_be_sent_is_sent_with_the_next_look(cluster: Refusing) -> None:
    looking = attachments(cluster)
    cluster.words = ("events",)
    looking.look()
    assert "events" not in cluster.written
    cluster.words = ()
    looking.look()
    looking.look()
    assert cluster.written.count("events") == 2


def test_nothing_is_written_once_another_replica_leads(cluster: Refusing) -> None:
    answers = iter([True])
    attachments(cluster, lambda: next(answers, False)).look()
    assert cluster.written == ["transferqueuebindings/a/status"]


def test_an_operator_waits_for_definitions_that_are_not_served_yet(cluster: Refusing) -> None:
    cluster.definitions = False
    reconciler = Reconciler(cluster, IMAGES, (), "test")

    async def scene() -> None:
        parts = [reconciler.resync(0.01), attachments(cluster).run(0.01)]
        tasks = [asyncio.create_task(part) for part in parts]
        while cluster.requests.count("LIST pods") < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cluster.definitions = True
        while reconciler.last_sync is None or "events" not in cluster.written:
            for task in tasks:
                assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
