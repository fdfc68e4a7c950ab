"""A queue's life as the plan sees it: each transcripts/NAME.txt records what is written and said after every change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.unit.operator.queues import IMAGES, document
from tq_operator.plan.queue import Images, Queue, queue_from
from tq_operator.plan.rdma import choose_transport
from tq_operator.plan.status import Observation, queue_status
from tq_operator.plan.step import ALLOW_LOSS, PAUSE, lossy_change, next_step, wanted_children
from transfer_queue.config.resource import TlsMode
from transfer_queue.config.running import CheckpointReport, LastCheckpoint, Restored

TRANSCRIPTS = Path(__file__).parent / "transcripts"
CLAIM = "{backend: {mooncake: {globalSegmentSize: 256Mi}}, rdma: {policy: POLICY, claim: {deviceClassName: CLASS}}}"
MOONCAKE = "{backend: {mooncake: {globalSegmentSize: 256Mi}}, rdma: {policy: POLICY, resourceName: rdma/shared}}"


class World:
    """A cluster that does at once what it is told, and the log of it."""

    def __init__(self, spec: str) -> None:
        self.document = document(spec)
        self.images = IMAGES
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.status: dict[str, Any] = {}
        self.used: int | None = None
        self.drained: set[str] = set()
        self.capacity: int | None = None
        self.missing = ""
        self.default_tls: TlsMode = "off"
        self.works = True
        self.leaving: list[str] = []
        self.starting = False  # pods that are made do not get ready
        self.saver: CheckpointReport | None = None
        self.lines: list[str] = []

    def change(self, what: str, spec: str | None = None, **annotations: str) -> None:
        """The user changes the queue."""
        metadata = self.document["metadata"]
        self.document = document(spec, generation=metadata["generation"] + 1) if spec else self.document
        self.document["metadata"]["annotations"] = annotations
        self.settle(what)

    def settle(self, what: str) -> None:
        """Reconcile until nothing is written any more."""
        self.lines.append(f"* {what}")
        for _ in range(4):
            if not self._reconcile():
                return
        raise AssertionError(f"writes never end: {self.lines[-8:]}")

    def queue(self) -> Queue:
        return queue_from({**self.document, "status": self.status}, self.default_tls)

    def _reconcile(self) -> bool:
        queue = self.queue()
        same = self.status.get("observedGeneration") == queue.generation
        running = self.status.get("transport") if same else None
        decided = choose_transport(queue.spec, self.capacity, running, self.works, self.missing)
        queue = replace(queue, decided=decided)
        step = next_step(queue, self.images, self.children, bool(self.used), self.used, self.drained)
        queue = replace(queue, tls=queue.running_tls) if step.held else queue
        for child in step.apply:
            key = child["kind"], child["metadata"]["name"]
            self.lines.append(f"  {'apply' if key in self.children else 'create'} {' '.join(key)}")
            old = self.children.get(key, {}).get("spec", {}).get("volumeClaimTemplates")
            refused = key in self.children and old != child.get("spec", {}).get("volumeClaimTemplates")
            assert not refused, "the apiserver refuses other volumes of a StatefulSet"
            self.children[key] = self._made(child)
        for child in step.delete:
            self.lines.append(f"  delete {child['kind']} {child['metadata']['name']}")
            del self.children[child["kind"], child["metadata"]["name"]]
        pods = [{"metadata": {"name": name, "deletionTimestamp": "now"}} for name in self.leaving]
        seen = Observation(self.children, pods, used=self.used, problems=step.problems, held=step.held)
        seen = replace(seen, checkpoint=self.saver)
        status = queue_status(queue, seen, self.status, "2026-01-01T00:00:00Z")
        before, self.status = self.status, status
        if status.get("lastCheckpoint") != before.get("lastCheckpoint"):
            self.lines.append(f"  lastCheckpoint {status.get('lastCheckpoint')}")
        for condition in status["conditions"]:
            old = [c for c in before.get("conditions", []) if c["type"] == condition["type"]]
            if not old or any(old[0][key] != condition[key] for key in ("status", "reason", "message")):
                words = " ".join(condition[key] for key in ("type", "status", "reason", "message"))
                self.lines.append(f"  {words}".rstrip())
        return status != before or bool(step.apply or step.delete)

    def restarted(self, kind: str, name: str) -> None:
        """The pods of a workload are ready."""
        self.children[kind, name] = self._made(self.children[kind, name])

    def _made(self, child: dict[str, Any]) -> dict[str, Any]:
        works = self.works and not self.starting
        wanted = child.get("spec", {}).get("replicas", 0) if works else 0
        counts = {"observedGeneration": 1, "readyReplicas": wanted, "updatedReplicas": wanted}
        return {**child, "metadata": {**child["metadata"], "generation": 1}, "status": counts}


def lifetime() -> World:
    world = World("{backend: {simple: {}}}")
    world.settle("created")
    world.used = 1 << 20
    world.settle("rows are put")
    world.change("storage scaled out", "{backend: {simple: {}}, storage: {replicas: 3}}")
    del world.children["Service", "quickstart-storage"]
    world.settle("a service is deleted by hand")
    world.change(
        "a node label is wanted", "{backend: {simple: {}}, storage: {replicas: 3, nodeSelector: {disk: fast}}}"
    )
    world.used = 0
    world.settle("the rows are consumed")
    world.change("paused", **{PAUSE: "true"})
    world.change("resumed")
    return world


def storage_scaled() -> World:
    spec = "{backend: {simple: {}}, storage: {replicas: COUNT}}"
    world = World(spec.replace("COUNT", "1"))
    world.settle("created")
    world.used = 1 << 20
    world.change("one unit becomes three while there are rows", spec.replace("COUNT", "3"))
    world.leaving = ["quickstart-storage-2"]
    world.change("three become two", spec.replace("COUNT", "2"))
    world.leaving = []
    world.settle("the highest pod has moved its rows and is gone")
    world.change("a node label is wanted", spec.replace("COUNT", "2, nodeSelector: {disk: fast}"))
    world.used = 1 << 30
    world.change("two become one that has no room", spec.replace("COUNT", "1, nodeSelector: {disk: fast}"))
    world.used = 1 << 29
    world.settle("rows are consumed")
    world.change("none are wanted", spec.replace("COUNT", "0, nodeSelector: {disk: fast}"))
    return world


def storage_not_drained() -> World:
    spec = "{backend: {simple: {}}, storage: {replicas: 3, drainSeconds: 0}}"
    world = World(spec)
    world.settle("created, without drains")
    world.used = 1 << 20
    world.change("three become two", spec.replace("3", "2"))
    world.change("drains are wanted, which restarts the pods", "{backend: {simple: {}}, storage: {replicas: 3}}")
    world.drained = {"quickstart-storage-2"}
    world.change("its rows were moved by hand, and three become one", spec.replace("3", "1"))
    world.change("three become two", spec.replace("3", "2"))
    return world


def saved_and_restored() -> World:
    saves = "{backend: {simple: {}}, checkpoint: {schedule: 1h, destination: 's3://bucket/run7'}}"
    world = World("{backend: {simple: {}}}")
    world.settle("created")
    world.used = 1 << 20
    world.change("checkpoints are wanted while there are rows", saves)
    last = LastCheckpoint("2026-01-01T01:00:00Z", 7, 4096, "s3://bucket/run7/20260101T010000Z")
    world.saver = CheckpointReport(last)
    world.settle("one was saved")
    world.saver = CheckpointReport(LastCheckpoint(error="not saved: the bucket is gone"))
    world.settle("the first one of another pod failed")
    world.saver = CheckpointReport(LastCheckpoint())
    world.settle("the bucket is back, and the queue has no rows to save")
    world.saver = CheckpointReport(structs.replace(last, error="not saved: the bucket is gone"))
    world.settle("the next one failed")
    world.change("another schedule", saves.replace("1h", "2h"))
    world.saver = None
    world.change("no checkpoints any more", "{backend: {simple: {}}}")
    return world


def restored() -> World:
    world = World("{backend: {simple: {}}, restoreFrom: 's3://bucket/run7'}")
    world.settle("created")
    world.saver = CheckpointReport(restored=Restored("s3://bucket/run7", True, "loaded 7 rows"))
    world.settle("the checkpoint is loaded")
    world.saver = None
    world.used = 1 << 20
    world.settle("and rows are put")
    return world


def not_restored() -> World:
    world = World("{backend: {simple: {}}, restoreFrom: s3://b/1, checkpoint: {schedule: 1h, destination: 's3://b/2'}}")
    world.settle("created")
    words = "s3://b/1 was not loaded: the queue is not empty, it has 2 rows"
    world.saver = CheckpointReport(restored=Restored("s3://b/1", False, words))
    world.settle("somebody was faster")
    return world


def journal_on_a_volume() -> World:
    spec = "{backend: {simple: {}}, storage: {replicas: 3}, controller: {durability: node}}"
    world = World(spec)
    world.settle("created")
    world.used = 1 << 20
    world.images = replace(IMAGES, server="registry.example/server:2")
    world.starting = True
    world.settle("an operator with other images, while there are rows")
    world.starting = False
    world.restarted("Deployment", "quickstart-controller")
    world.settle("the controller is back with all rows")
    world.change("its journal is given up", "{backend: {simple: {}}, storage: {replicas: 3}}")
    return world


def journal_of_a_pod() -> World:
    world = World("{backend: {simple: {}}, controller: {durability: process}}")
    world.settle("created")
    world.used = 1 << 20
    world.images = replace(IMAGES, server="registry.example/server:2")
    world.settle("an operator with other images: the journal would go with the pod")
    return world


def backend_changed() -> World:
    world = World("{backend: {simple: {}}}")
    world.settle("created")
    world.used = 5
    world.change("another backend", "{backend: {ray: {}}}")
    world.change("the rows are given up", "{backend: {ray: {}}}", **{ALLOW_LOSS: "true"})
    return world


def shards_changed() -> World:
    spec = "{backend: {simple: {}}, controller: {shards: COUNT}}"
    world = World(spec.replace("COUNT", "1"))
    world.settle("created")
    world.used = 1 << 20
    world.change("two shards are wanted while there are rows", spec.replace("COUNT", "2"))
    world.used = 0
    world.settle("the rows are consumed")
    world.change("and one again", spec.replace("COUNT", "1"))
    return world


def shards_changed_with_a_journal() -> World:
    spec = "{backend: {simple: {}}, controller: {shards: COUNT, durability: node}}"
    world = World(spec.replace("COUNT", "2"))
    world.settle("created")
    world.used = 1 << 20
    world.images = replace(IMAGES, server="registry.example/server:2")
    world.settle("an operator with other images, while there are rows")
    world.change("three shards are wanted while there are rows", spec.replace("COUNT", "3"))
    world.used = 0
    world.settle("the rows are consumed")
    return world


def operator_upgraded() -> World:
    world = World("{backend: {simple: {}}}")
    world.settle("created")
    world.images = replace(IMAGES, server="registry.example/server:2")
    world.used = 5
    world.settle("an operator with other images, while there are rows")
    world.used = 0
    world.settle("the rows are consumed")
    return world


def name_conflict() -> World:
    world = World("{backend: {simple: {}}}")
    foreign = {"kind": "ConfigMap", "metadata": {"name": "quickstart-config", "namespace": "rl", "uid": "other"}}
    world.children["ConfigMap", "quickstart-config"] = foreign
    world.settle("created beside a foreign object")
    del world.children["ConfigMap", "quickstart-config"]
    world.settle("the foreign object is gone")
    return world


def rdma_auto() -> World:
    world = World(MOONCAKE.replace("POLICY", "auto"))
    world.capacity = 0
    world.settle("created where no node has RDMA")
    world.capacity = 4
    world.settle("a node with RDMA comes")
    world.capacity = None
    world.settle("the operator may not read nodes any more")
    world.capacity = 4
    world.change("another spec", MOONCAKE.replace("POLICY", "auto").replace("256", "512"))
    world.capacity = 0
    world.settle("the RDMA nodes leave while all pods run")
    world.works = False
    world.settle("the pods stopped")
    return world


def rdma_required() -> World:
    world = World(MOONCAKE.replace("POLICY", "required"))
    world.capacity, world.works = 0, False
    world.settle("created where no node has RDMA")
    world.capacity = 4
    world.settle("a node with RDMA comes")
    return world


def rdma_without_a_resource() -> World:
    world = World("{backend: {mooncake: {globalSegmentSize: 256Mi}}}")
    world.settle("created")
    return world


def rdma_claim() -> World:
    spec = CLAIM.replace("POLICY", "auto").replace("CLASS", "a.example")
    world = World(spec)
    world.capacity, world.missing = 0, "no ResourceSlice lists a device; check that the DRA driver runs"
    world.settle("created where no node has a device")
    world.capacity, world.missing = 4, ""
    world.settle("a node with devices comes")
    world.change("another spec", spec.replace("256", "512"))
    world.used, world.starting = 5, True
    world.change("another class: each pod moves its rows", spec.replace("256", "512").replace("a.example", "b.example"))
    world.used, world.starting = 0, False
    world.restarted("StatefulSet", "quickstart-storage")
    world.settle("they are ready")
    world.capacity = None
    world.settle("the operator may not see devices any more")
    world.capacity = 0
    world.settle("the devices are gone while all pods run")
    world.change("TCP is wanted", "{backend: {mooncake: {protocol: tcp, globalSegmentSize: 512Mi}}}")
    return world


def rdma_claim_required() -> World:
    world = World(CLAIM.replace("POLICY", "required").replace("CLASS", "a.example"))
    world.capacity, world.works = 0, False
    world.missing = "DeviceClass a.example does not exist; check the DRA driver and the name"
    world.settle("created where nobody has made the class")
    world.capacity, world.missing, world.works = 4, "", True
    for key in list(world.children):
        world.restarted(*key)
    world.settle("the driver is installed")
    return world


def durability_changed() -> World:
    spec = "{backend: {simple: {}}, controller: {durability: DURABILITY}}"
    world = World(spec.replace("DURABILITY", "none"))
    world.settle("created")
    world.used = 1 << 20
    world.change("rows shall survive the node", spec.replace("DURABILITY", "node"))
    world.used = 0
    world.settle("the rows are consumed")
    world.change("and now they need not", spec.replace("DURABILITY", "none"))
    return world


def spill_turned_on() -> World:
    spec = "{backend: {simple: {}}, storage: {replicas: 2}}"
    spill = spec.replace("simple: {}", "simple: {ssdOffload: {capacity: 1Gi MORE}}")
    world = World(spec)
    world.settle("created, with memory alone")
    world.used = 1 << 20
    world.change("a disk beyond the memory, while there are rows", spill.replace("MORE", ""))
    world.used = 0
    world.settle("the rows are consumed")
    world.used = 1 << 20
    world.change("another disk, while there are rows", spill.replace("MORE", ", storageClassName: local-ssd"))
    world.used = 0
    world.settle("the rows are consumed")
    world.change("no disk any more", spec)
    return world


def masters_changed() -> World:
    one = "{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi MORE}}}"
    several = one.replace("MORE", ", highAvailability: {masters: 3, etcd: ETCD}")
    world = World(one.replace("MORE", ""))
    world.settle("created, with one master")
    world.used = 5
    world.change("three masters, while there are rows", several.replace("ETCD", "{development: {}}"))
    world.used = 0
    world.settle("the rows are consumed")
    world.used = 5
    five = several.replace("masters: 3", "masters: 5")
    world.change("three become five, while there are rows", five.replace("ETCD", "{development: {}}"))
    world.change("another etcd, while there are rows", five.replace("ETCD", "{endpoints: ['etcd:2379']}"))
    world.used = 0
    world.settle("the rows are consumed")
    world.change("one master again", one.replace("MORE", ""))
    return world


def policies_changed() -> World:
    world = World("{backend: {simple: {}}}")
    world.settle("created")
    world.used = 5
    world.change(
        "a policy for the network, while there are rows", "{backend: {simple: {}}, security: {networkPolicy: true}}"
    )
    world.change("no policy, and evictions are allowed", "{backend: {simple: {}}, disruptionBudget: false}")
    return world


def tls_turned_on() -> World:
    world = World("{backend: {simple: {}}, storage: {replicas: 3}}")
    world.settle("created, without TLS")
    world.used = 1 << 20
    world.default_tls = "operator"
    world.settle("the chart is upgraded to TLS by default while there are rows")
    world.lines.append(f"  new pods connect as before: tls {world.queue().running_tls}")
    world.used = 0
    world.settle("the rows are consumed")
    world.lines.append(f"  new pods get certificates: tls {world.queue().running_tls}")
    world.change(
        "the queue says off", '{backend: {simple: {}}, storage: {replicas: 3}, security: {tls: {mode: "off"}}}'
    )
    return world


@pytest.mark.parametrize(
    "scenario",
    [
        lifetime,
        storage_scaled,
        storage_not_drained,
        journal_on_a_volume,
        journal_of_a_pod,
        shards_changed,
        shards_changed_with_a_journal,
        backend_changed,
        operator_upgraded,
        name_conflict,
        durability_changed,
        spill_turned_on,
        saved_and_restored,
        restored,
        not_restored,
        masters_changed,
        policies_changed,
        tls_turned_on,
        rdma_auto,
        rdma_required,
        rdma_claim,
        rdma_claim_required,
        rdma_without_a_resource,
    ],
)
def test_every_transition_is_as_recorded(scenario: Callable[[], World], regenerate: bool) -> None:
    text = "\n".join(scenario().lines) + "\n"
    path = TRANSCRIPTS / f"{scenario.__name__.replace('_', '-')}.txt"
    if regenerate:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"see the difference: pytest {__file__} --regenerate; git diff"


CHANGES = [
    ("{backend: {simple: {}}, storage: {replicas: 3}}", False),
    ("{backend: {simple: {}}, access: {namespaces: [jobs]}}", False),
    ("{backend: {simple: {}}, storage: {replicas: 1}}", True),
    ("{backend: {simple: {}}, storage: {capacity: 512Mi}}", True),
    ("{backend: {simple: {}}, controller: {sampler: {name: RankAwareSampler}}}", True),
    ("{backend: {simple: {}}, controller: {shards: 2}}", True),
    ("{backend: {ray: {}}}", True),
    ("{backend: {simple: {}}, checkpoint: {schedule: 1h, destination: /x}}", False),
]


@pytest.mark.parametrize(("spec", "lossy"), CHANGES)
def test_only_a_change_that_stops_a_process_with_rows_is_lossy(spec: str, lossy: bool) -> None:
    before, after = (queue_from(document(text)) for text in ("{backend: {simple: {}}}", spec))
    assert bool(lossy_change(before, after, True)) == lossy
    assert lossy_change(before, after, False) == ""
    allowed = queue_from(document(spec, annotations={ALLOW_LOSS: "true"}))
    assert lossy_change(before, allowed, True) == ""


def test_the_hash_of_a_template_follows_the_template_alone() -> None:
    def mark(spec: str, images: Images = IMAGES) -> set[str]:
        children = wanted_children(queue_from(document(spec)), images)
        return {
            child["metadata"]["annotations"]["transferqueue.io/template"]
            for child in children
            if child["kind"] in ("Deployment", "StatefulSet")
        }

    assert mark("{backend: {simple: {}}}") == mark("{backend: {simple: {}}, storage: {replicas: 7}}")
    assert not mark("{backend: {simple: {}}}") & mark("{backend: {simple: {}}}", replace(IMAGES, server="other:1"))
