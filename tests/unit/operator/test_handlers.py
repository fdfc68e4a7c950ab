"""What kopf watches reaches the reconciler."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES, document
from tq_operator.plan.names import labels
from tq_operator.runtime.cluster import CHILD_KINDS, POD, UNWATCHED
from tq_operator.runtime.handlers import watch
from tq_operator.runtime.reconciler import Reconciler

KEY = ("rl", "quickstart")


class Watching(Reconciler):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(MemoryCluster(), IMAGES, (), "test")
        self.asked: list[Any] = []
        self.work.add = self.asked.append  # type: ignore[method-assign]
        registry = kopf.OperatorRegistry()
        watch(registry, self)
        self.handlers: dict[Any, Any] = {
            handler.selector.any_name: handler.fn
            for handler in registry._watching.get_all_handlers()
            if handler.selector is not None
        }

    def list_soon(self) -> None:
        self.asked.append("list")

    def hear(self, plural: str, kind: str | None, item: dict[str, Any]) -> list[Any]:
        """What a watch event of that kind leads to."""
        self.asked.clear()
        names = {name: item["metadata"][name] for name in ("namespace", "name")}
        asyncio.run(self.handlers[plural](event={"type": kind, "object": item}, **names))
        return list(self.asked)


def test_a_secret_that_is_changed_or_deleted_asks_for_its_queue_in_whichever_namespace_it_is() -> None:
    watching = Watching()
    for namespace, name in (("rl", "quickstart"), ("jobs", "rl/quickstart")):
        marks = {"labels": labels("quickstart", "tls-client"), "annotations": {"transferqueue.io/queue": name}}
        item = {"kind": "Secret", "metadata": {"namespace": namespace, "name": "a", **marks}}
        for kind in ("MODIFIED", "DELETED"):
            assert watching.hear("secrets", kind, item) == [KEY]
    assert watching.hear("secrets", "MODIFIED", {"metadata": {"namespace": "rl", "name": "theirs"}}) == []


@pytest.mark.parametrize("kind", [kind for kind in (*CHILD_KINDS, POD) if kind not in UNWATCHED])
def test_every_kind_of_child_is_watched(kind: str) -> None:
    watching, plural = Watching(), CHILD_KINDS.get(kind, ("", "pods"))[1]
    marks = {"labels": labels("quickstart", "controller"), "annotations": {"transferqueue.io/queue": "quickstart"}}
    metadata: dict[str, Any] = {"namespace": "rl", "name": "a", "uid": "u", **marks}

    def item(version: int) -> dict[str, Any]:
        return {"kind": kind, "metadata": {**metadata, "resourceVersion": str(version)}}

    def known() -> int:
        found = watching.watched.children(*KEY), watching.watched.pods(*KEY)
        return sum(map(len, found))

    assert watching.hear(plural, "ADDED", item(7)) == [KEY]
    assert known() == 1
    assert watching.hear(plural, "DELETED", item(8)) == [KEY]
    assert known() == 0
    assert watching.hear(plural, None, item(9)) == ["list", KEY], "what was deleted before a list is not told"


def test_a_queue_is_known_to_admission_as_long_as_it_exists() -> None:
    watching = Watching()
    told = document("{backend: {simple: {}}}", managedFields=[{"manager": "kubectl"}])
    for kind in ("ADDED", "MODIFIED"):
        assert watching.hear("transferqueues", kind, told) == [KEY]
        assert watching.documents[KEY]["spec"] == told["spec"]
        assert "managedFields" not in watching.documents[KEY]["metadata"]
    assert watching.hear("transferqueues", "DELETED", told) == [KEY]
    assert KEY not in watching.documents
