"""What watches told of children and pods answers for the apiserver: fewer requests, and never an older answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.operator.apiserver import MemoryCluster
from tests.unit.operator.queues import IMAGES, document
from tq_operator.plan.names import QUEUE_ANNOTATION, labels
from tq_operator.runtime.cluster import CHILD_KINDS, POD
from tq_operator.runtime.reconciler import Reconciler
from tq_operator.runtime.watched import Watched

QUEUES = "/apis/transferqueue.io/v1alpha1/namespaces/rl/transferqueues"
PODS = "/api/v1/namespaces/rl/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/rl/deployments"
KINDS = {plural: kind for kind, (_, plural) in CHILD_KINDS.items()} | {"pods": POD}
KEY = ("rl", "quickstart")


class World:
    """One queue, its reconciler, and an apiserver whose watch events arrive when ``watch`` is called."""

    def __init__(self, spec: str = "{backend: {simple: {}}, storage: {replicas: 0}}") -> None:
        self.cluster = MemoryCluster()
        self.cluster.put(f"{QUEUES}/quickstart", document(spec))
        self.reconciler = Reconciler(self.cluster, IMAGES, (), "test")

    def relist(self) -> set[tuple[str, str]]:
        return self.reconciler.watched.sync(self.cluster, ())

    def watch(self) -> set[tuple[str, str]]:
        """Queues that the events since the last call are news for."""
        news: set[tuple[str, str]] = set()
        for plural, event in self.cluster.events:
            if plural in KINDS:
                news |= self.reconciler.watched.take(KINDS[plural], event)
        self.cluster.events.clear()
        return news

    def look(self, *, settled: bool = True) -> list[str]:
        """The requests of one look at the queue."""
        self.cluster.requests.clear()
        assert self.reconciler.reconcile(KEY) == settled
        return list(self.cluster.requests)


@pytest.fixture
def world() -> World:
    made = World()
    made.relist()
    return made


def pod(owner: str = "rl/quickstart", phase: str = "Running") -> dict[str, Any]:
    metadata = {
        "labels": {"transferqueue.io/queue": owner.partition("/")[2]},
        "annotations": {"transferqueue.io/injected": owner},
    }
    return {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": phase}}


def test_a_look_that_creates_asks_only_for_what_others_may_have_made(world: World) -> None:
    asked = world.look()
    made = ["configmaps", "services", "deployments", "services", "statefulsets", *["poddisruptionbudgets"] * 2]
    assert asked == [
        "GET transferqueues",
        *(f"GET {plural}" for plural in made),
        *(f"PATCH {plural}" for plural in made),
        "PATCH transferqueues/status",
    ]


def test_a_look_at_rest_asks_for_the_queue_alone_whether_or_not_its_own_writes_were_watched(world: World) -> None:
    world.look()
    assert world.look() == ["GET transferqueues"]
    world.watch()
    assert world.look() == ["GET transferqueues"]


def test_without_a_complete_list_everything_is_asked_for(world: World) -> None:
    world.look()
    world.reconciler.request_all()  # elected: another replica may have written
    lists = [f"LIST {plural}" for plural in KINDS]
    assert world.look() == ["GET transferqueues", *lists]
    world.relist()
    assert world.look() == ["GET transferqueues"]


def test_a_list_that_began_before_an_election_is_not_enough(world: World) -> None:
    watched, pages = world.reconciler.watched, world.cluster.pages

    def elected(kind: str, namespaces: Any) -> Any:
        watched.expire()
        return pages(kind, namespaces)

    world.cluster.pages = elected  # type: ignore[method-assign]
    world.relist()
    assert not watched.complete


def test_a_child_that_is_deleted_or_changed_is_mended(world: World) -> None:
    world.look()
    world.cluster.drop(f"{DEPLOYMENTS}/quickstart-controller")
    assert world.watch() == {KEY}
    assert world.look() == ["GET transferqueues", "GET deployments", "PATCH deployments"]
    changed = world.cluster.objects[f"{DEPLOYMENTS}/quickstart-controller"]
    world.cluster.put(f"{DEPLOYMENTS}/quickstart-controller", {**changed, "spec": {**changed["spec"], "replicas": 7}})
    assert world.watch() == {KEY}
    assert world.look() == ["GET transferqueues", "PATCH deployments"]
    assert world.cluster.objects[f"{DEPLOYMENTS}/quickstart-controller"]["spec"]["replicas"] == 1


def test_a_child_whose_managed_fields_were_cleared_is_applied_once(world: World) -> None:
    world.look()
    world.watch()
    path = f"{DEPLOYMENTS}/quickstart-controller"
    cleared = world.cluster.objects[path]
    world.cluster.put(path, {**cleared, "metadata": {**cleared["metadata"], "managedFields": []}})
    assert world.watch() == {KEY}
    assert "PATCH deployments" in world.look()
    world.watch()
    assert world.look() == ["GET transferqueues"]


@pytest.mark.parametrize("value", ["other", None])
def test_a_child_whose_annotation_names_another_queue_is_news_for_its_own(world: World, value: str | None) -> None:
    world.look()
    world.watch()
    path = f"{DEPLOYMENTS}/quickstart-controller"
    changed = world.cluster.objects[path]
    annotations = {**changed["metadata"]["annotations"], QUEUE_ANNOTATION: value}
    kept = {name: text for name, text in annotations.items() if text is not None}
    world.cluster.put(path, {**changed, "metadata": {**changed["metadata"], "annotations": kept}})
    assert KEY in world.watch()
    assert "PATCH deployments" in world.look()
    assert world.cluster.objects[path]["metadata"]["annotations"][QUEUE_ANNOTATION] == "quickstart"


def test_a_deletion_that_no_watch_told_of_is_seen_by_the_next_list(world: World) -> None:
    world.look()
    world.watch()
    world.cluster.drop(f"{DEPLOYMENTS}/quickstart-controller", told=False)
    assert world.look() == ["GET transferqueues"]
    assert world.relist() == {KEY}
    assert world.look() == ["GET transferqueues", "GET deployments", "PATCH deployments"]


def test_a_kind_that_is_only_listed_is_known_by_own_writes_too() -> None:
    templates = "/apis/resource.k8s.io/v1/namespaces/rl/resourceclaimtemplates"
    manifest = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "old", "namespace": "rl", "labels": labels("quickstart", "rdma"), "annotations": {}},
        "spec": {},
    }
    world = World()
    watched, key = world.reconciler.watched, ("ResourceClaimTemplate", "old")
    listed = world.cluster.put(f"{templates}/old", manifest)
    world.relist()
    assert key in watched.children(*KEY)
    watched.drop("ResourceClaimTemplate", listed)
    assert key not in watched.children(*KEY)


def test_what_belongs_to_something_else_is_never_taken_over_and_asked_for_until_it_is_gone(world: World) -> None:
    path = "/api/v1/namespaces/rl/configmaps/quickstart-config"
    for marks in ({}, {"labels": labels("quickstart", "config")}):
        world.cluster.put(path, {"kind": "ConfigMap", "metadata": dict(marks), "data": {"a": "b"}})
        world.watch()
        assert "PATCH configmaps" not in world.look(settled=False)
        assert world.cluster.objects[path]["data"] == {"a": "b"}
        assert "GET configmaps" in world.look(settled=False)
        world.cluster.drop(path, told=False)
        assert "PATCH configmaps" in world.look()
        world.cluster.drop(path)


def test_pods_are_counted_from_the_watch_and_only_what_says_something_asks_for_a_look(world: World) -> None:
    world.look()
    world.watch()
    for number in range(250):  # several pages
        world.cluster.put(f"{PODS}/pod-{number}", pod())
    world.cluster.put(f"{PODS}/other", pod("jobs/quickstart"))
    assert world.watch() == {KEY, ("jobs", "quickstart")}
    assert world.look() == ["GET transferqueues", "PATCH transferqueues/status"]
    assert world.cluster.objects[f"{QUEUES}/quickstart"]["status"]["injected"] == 250

    told = pod()
    told["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    world.cluster.put(f"{PODS}/pod-0", told)
    assert world.watch() == set(), "a condition of a pod that uses the queue is none of its business"
    world.cluster.put(f"{PODS}/pod-0", pod(phase="Succeeded"))
    assert world.watch() == {KEY}
    world.look()
    assert world.cluster.objects[f"{QUEUES}/quickstart"]["status"]["injected"] == 249

    fresh = Watched()
    fresh.sync(world.cluster, ())
    assert fresh.pods(*KEY) == world.reconciler.watched.pods(*KEY)
    assert len(fresh.pods("jobs", "quickstart")) == 1


def test_a_part_of_the_queue_keeps_what_says_why_it_does_not_run(world: World) -> None:
    state = {"name": "controller", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    marks = {"labels": labels("quickstart", "controller"), "annotations": {"transferqueue.io/queue": "quickstart"}}
    world.cluster.put(f"{PODS}/part", {"metadata": marks, "status": {"containerStatuses": [state]}})
    world.watch()
    world.look()
    (degraded,) = [
        entry
        for entry in world.cluster.objects[f"{QUEUES}/quickstart"]["status"]["conditions"]
        if entry["type"] == "Degraded"
    ]
    assert degraded["reason"] == "ImagePullFailed"


@pytest.mark.parametrize("change", ["deleted", "changed", "made"])
def test_an_event_while_the_queues_are_listed_is_not_undone_by_the_list(change: str) -> None:
    world = World()
    listed = world.cluster.queues

    async def scene() -> None:
        loop = asyncio.get_running_loop()

        def queues(namespaces: Any) -> Any:
            found = listed(namespaces)
            newer = {**document("{backend: {simple: {}}}"), "newer": True}
            heard = asyncio.run_coroutine_threadsafe(hear(None if change == "deleted" else newer), loop)
            heard.result(10)
            return [] if change == "made" else found

        async def hear(told: Any) -> None:
            world.reconciler.saw(KEY, told)

        world.cluster.queues = queues  # type: ignore[method-assign]
        task = asyncio.create_task(world.reconciler.resync(300.0))
        while world.reconciler.last_sync is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(scene(), 30))
    known = world.reconciler.documents
    assert (KEY not in known) if change == "deleted" else known[KEY].get("newer")


@pytest.mark.parametrize("lists", [0, 1, 2])
def test_an_answer_that_comes_after_the_deletion_does_not_bring_the_object_back(world: World, lists: int) -> None:
    made = world.cluster.put(f"{DEPLOYMENTS}/a", {"kind": "Deployment", "metadata": {"labels": labels("q", "a")}})
    world.cluster.drop(f"{DEPLOYMENTS}/a")
    world.watch()
    for _ in range(lists):
        world.relist()
    assert not world.reconciler.watched.put("Deployment", made)
    assert world.reconciler.watched.children("rl", "q") == {}


NAMES = st.sampled_from(["a", "b", "c"])


class AnyOrder(RuleBasedStateMachine):
    """Events come late but in their order, for each object; answers to writes and lists come late as well."""

    @initialize()
    def start(self) -> None:
        self.cluster = MemoryCluster()
        self.watched = Watched()
        self.answers: list[dict[str, Any]] = []
        self.lists: list[dict[str, Any]] = []

    @rule(name=NAMES, mark=st.integers(0, 2), answered=st.booleans())
    def write(self, name: str, mark: int, answered: bool) -> None:
        metadata = {"labels": labels("q", "controller"), "annotations": {"mark": str(mark)}}
        made = self.cluster.put(f"{DEPLOYMENTS}/{name}", {"kind": "Deployment", "metadata": metadata})
        if answered:
            self.answers.append(made)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if f"{DEPLOYMENTS}/{name}" in self.cluster.objects:
            self.cluster.drop(f"{DEPLOYMENTS}/{name}")

    @precondition(lambda self: self.cluster.events)
    @rule(which=st.integers(0, 100))
    def hear(self, which: int) -> None:
        chosen = self.cluster.events[which % len(self.cluster.events)][1]["object"]["metadata"]["uid"]
        first = next(entry for entry in self.cluster.events if entry[1]["object"]["metadata"]["uid"] == chosen)
        self.cluster.events.remove(first)
        self.watched.take("Deployment", first[1])

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 100))
    def hear_answer(self, which: int) -> None:
        self.watched.put("Deployment", self.answers.pop(which % len(self.answers)))

    @precondition(lambda self: not self.lists)  # one after the other
    @rule()
    def make_list(self) -> None:
        self.lists.append({kind: list(self.cluster.pages(kind, ())) for kind in KINDS.values()})

    def sources(self) -> list[tuple[Callable[[int], None], Sized]]:
        return [(self.hear, self.cluster.events), (self.hear_answer, self.answers), (self.hear_list, self.lists)]

    @precondition(lambda self: self.lists)
    @rule(which=st.integers(0, 100))
    def hear_list(self, which: int) -> None:
        pages, listing = self.lists.pop(which % len(self.lists)), MemoryCluster()
        listing.pages = lambda kind, _: iter(pages[kind])  # type: ignore[method-assign,assignment]
        self.watched.sync(listing, ())

    @rule(random=st.randoms(use_true_random=False))
    def once_all_is_heard_it_is_as_the_apiserver_has_it(self, random: Random) -> None:
        while waiting := [hear for hear, left in self.sources() if left]:
            random.choice(waiting)(random.randrange(100))
        wanted = {path.rsplit("/", 1)[-1]: item for path, item in self.cluster.objects.items()}
        found = {name: child for (_, name), child in self.watched.children("rl", "q").items()}
        assert found.keys() == wanted.keys()
        for name, child in found.items():
            assert child["metadata"]["annotations"] == wanted[name]["metadata"]["annotations"]


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
