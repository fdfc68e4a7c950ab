"""A change that would lose rows stays held while the controller does not say how much there is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.operator.queues import document
from tests.unit.operator.test_watched import DEPLOYMENTS, PODS, QUEUES, World
from tq_operator.plan.names import labels
from tq_operator.runtime import reconciler
from tq_operator.runtime.usage import Usage

STORAGE = "/apis/apps/v1/namespaces/rl/statefulsets/quickstart-storage"
SPEC = """
backend: {simple: {}}
storage: {replicas: 2, capacity: CAPACITY}
controller: {durability: DURABILITY, shards: SHARDS}
"""


class Life:
    """A queue whose controller tells of one GiB, and which then shall have smaller storage units."""

    def __init__(self, durability: str, monkeypatch: pytest.MonkeyPatch, shards: int = 1) -> None:
        self.used: int | None = 1 << 30
        self.told: dict[int, int | None] = {}
        """What a shard says instead, by its port for metrics."""
        monkeypatch.setattr(reconciler, "storage_usage", self.stored)
        self.spec = SPEC.replace("DURABILITY", durability).replace("SHARDS", str(shards))
        self.world = World(self.spec.replace("CAPACITY", "2Gi"))
        self.world.relist()
        self.world.look()
        self.controller(1)
        self.look()
        self.world.cluster.put(
            f"{QUEUES}/quickstart", {**document(self.spec.replace("CAPACITY", "1Gi")), "status": self.status}
        )

    def stored(self, url: str) -> Usage:
        (port,) = re.findall(r"^http://quickstart-controller.rl.svc:(\d+)/metrics$", url)
        return Usage(self.told.get(int(port), self.used))

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.world.cluster.objects[f"{QUEUES}/quickstart"]["status"]
        return found

    def controller(self, ready: int) -> None:
        path = f"{DEPLOYMENTS}/quickstart-controller"
        self.world.cluster.put(path, {**self.world.cluster.objects[path], "status": {"readyReplicas": ready}})

    def look(self) -> list[str]:
        self.world.watch()
        return self.world.look()

    def is_held(self) -> bool:
        before = self.world.cluster.objects[STORAGE]["spec"]
        self.look()
        self.look()
        return bool(self.world.cluster.objects[STORAGE]["spec"] == before)


@pytest.mark.parametrize("durability", ["none", "process", "node"])
def test_a_change_stays_held_while_a_busy_controller_does_not_answer(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(durability, monkeypatch)
    life.used = None
    assert life.is_held()
    assert life.status["storage"]["used"] == "1Gi", "admission asks for it"
    life.used = 0
    assert not life.is_held()
    assert life.status["storage"]["used"] == "0"


@pytest.mark.parametrize(("durability", "held"), [("none", False), ("process", True), ("node", True)])
def test_a_change_stays_held_while_a_controller_with_a_journal_starts_again(
    durability: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(durability, monkeypatch)
    life.used = None
    life.controller(0)
    assert life.is_held() == held
    assert ("used" in life.status["storage"]) == held


@pytest.mark.parametrize(("state", "held"), [("running", True), ("terminated", False)])
def test_a_change_stays_held_while_the_controller_runs_though_it_is_not_ready(
    state: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life("none", monkeypatch)
    life.used = None
    life.controller(0)
    marks = {"labels": labels("quickstart", "controller"), "annotations": {"transferqueue.io/queue": "quickstart"}}
    status = {"containerStatuses": [{"name": "controller", "ready": False, "state": {state: {}}}]}
    life.world.cluster.put(f"{PODS}/quickstart-controller-0", {"metadata": marks, "status": status})
    assert life.is_held() == held


@pytest.mark.parametrize("port", [9060, 9061, 9062])
@pytest.mark.parametrize("said", [None, 1 << 30])
def test_a_change_stays_held_until_every_shard_says_that_nothing_is_stored(
    port: int, said: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life("none", monkeypatch, shards=3)
    life.used, life.told = 0, {port: said}
    assert life.is_held()
    assert life.status["storage"]["used"] == "1Gi"
    life.told = {}
    assert not life.is_held()


def test_the_use_of_storage_units_that_were_given_up_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life("node", monkeypatch)
    life.used = None  # no unit is left that could be told of
    found = life.world.cluster.objects[STORAGE]
    life.world.cluster.put(STORAGE, {**found, "spec": {**found["spec"], "replicas": 0}, "status": {"replicas": 0}})
    spec = life.spec.replace("CAPACITY", "1Gi").replace("replicas: 2", "replicas: 0")
    life.world.cluster.put(f"{QUEUES}/quickstart", {**document(spec), "status": life.status})
    life.look()
    assert "used" not in life.status["storage"]
