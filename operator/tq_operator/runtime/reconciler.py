"""Level-triggered reconciliation: compare what exists with what is wanted, and write the difference."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from tq_operator.plan.difference import foreign_owner, owned_by
from tq_operator.plan.drift import IGNORE_DRIFT_ANNOTATION, drift, foreign_entries, managed_fields_cleared
from tq_operator.plan.masters import etcd_data
from tq_operator.plan.names import INJECTED_ANNOTATION, MANAGER, QUEUE_ANNOTATION
from tq_operator.plan.problems import Problem, refusal
from tq_operator.plan.queue import Images, Manifest, Queue, queue_from
from tq_operator.plan.rdma import Transport, choose_transport
from tq_operator.plan.status import Observation, known_use, master_problem, queue_status, refused_status
from tq_operator.plan.step import WORKLOADS, Children, Step, next_step, wanted_children
from tq_operator.runtime.certificates import Certificates
from tq_operator.runtime.checkpoints import checkpoint_report
from tq_operator.runtime.cluster import Cluster, ClusterError, ImmutableError, StaleError
from tq_operator.runtime.events import EventGate, event, worth_an_event
from tq_operator.runtime.lease import is_held
from tq_operator.runtime.masters import master_group
from tq_operator.runtime.metrics import OperatorMetrics
from tq_operator.runtime.usage import Usage, storage_usage, together
from tq_operator.runtime.watched import Key, Watched, key_of
from tq_operator.runtime.work_queue import WorkQueue
from transfer_queue.config.resource import TlsMode
from transfer_queue.errors import ConfigError

__all__ = ["Reconciler"]

logger = logging.getLogger("tq_operator.reconciler")

_LIST_S = 2.0
"""From the first event of a list that kopf makes until it is over for all kinds."""
_SAVES_S = 15.0
"""Between two looks at a queue that is restored or saved."""
_FINISHED = {"Succeeded", "Failed"}


class Reconciler:
    """Brings the children of queues to what the plan wants, and their status to what there is."""

    def __init__(
        self,
        cluster: Cluster,
        images: Images,
        namespaces: tuple[str, ...],
        identity: str,
        leading: Callable[[], bool] = lambda: True,
        default_tls: TlsMode = "off",
        release: str = "",
    ) -> None:
        """``leading``: whether this replica may write; asked before every write. ``default_tls``: of queues that say
        nothing of TLS. ``release``: namespace and name of the Lease; empty: other operators are ignored."""
        self._cluster = cluster
        self._images = images
        self._namespaces = namespaces
        self._identity = identity
        self._leading = leading
        self._default_tls = default_tls
        self._release = release
        self._certificates = Certificates(cluster, namespaces, self._check_leading)
        self._gate = EventGate()
        self.work = WorkQueue(self._look, leading)
        self.metrics = OperatorMetrics()
        self.documents: dict[Key, Manifest] = {}
        """Queues as last seen, for admission."""
        self.watched = Watched()
        self._told: set[Key] = set()
        """Queues with an event since the last list of all was asked for: it may be older than that."""
        self._list = asyncio.Event()
        self._listing: asyncio.TimerHandle | None = None
        self.last_sync: float | None = None
        """Loop time of the last complete look at all queues."""

    def request_all(self) -> None:
        """Look at every known queue: this replica was elected. What another one wrote may not be watched yet."""
        self.watched.expire()
        self._list.set()
        for key in self.documents:
            self.work.add(key)

    def saw(self, key: Key, document: Manifest | None) -> None:
        """A queue changed; None: it was deleted."""
        self._told.add(key)
        if document is None:
            self.documents.pop(key, None)
        else:
            self.documents[key] = _kept(copy.deepcopy(dict(document)))
        self.work.add(key)

    def list_soon(self) -> None:
        """List children and pods: their watch restarted, and deletions before that are not reported."""
        if self._listing is None:
            self._listing = asyncio.get_running_loop().call_later(_LIST_S, self._list.set)

    async def resync(self, interval: float) -> None:
        """Ask for every queue each ``interval`` seconds: a watch can go silent without an error."""
        loop = asyncio.get_running_loop()
        following = 0.0
        while True:
            self._list.clear()
            self._listing = None
            await self._sync()
            if loop.time() >= following:
                await self._look_at_all(interval)
                following = loop.time() + (interval if self.last_sync is not None else 1.0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._list.wait(), following - loop.time())

    async def follow_saves(self) -> None:
        """Look at the queues that are restored or saved at intervals, as no event reports their progress."""
        while True:
            await asyncio.sleep(_SAVES_S)
            for key, document in self.documents.items():
                if document["spec"].keys() & {"checkpoint", "restoreFrom"}:
                    self.work.add(key)

    async def _sync(self) -> None:
        """List children and pods, and look at the queues of which the watches did not tell all."""
        try:
            for key in await asyncio.to_thread(self.watched.sync, self._cluster, self._namespaces):
                if self.last_sync is not None:
                    self.work.add(key)
        except (ClusterError, NotFoundError) as error:
            logger.warning("cannot list the children of queues: %s", error)

    async def _look_at_all(self, interval: float) -> None:
        """List the queues and ask for each."""
        loop = asyncio.get_running_loop()
        try:
            self._told.clear()
            found = await asyncio.to_thread(self._cluster.queues, self._namespaces)
            known = {key_of(document): _kept(document) for document in found}
            newer = {key: self.documents[key] for key in self._told & self.documents.keys()}
            older = {key: document for key, document in known.items() if key not in self._told}
            self.documents.clear()  # the same mapping for admission, which reads it on this loop
            self.documents.update({**older, **newer})
            self.metrics.queues.labels("known").set(len(found))
            self.metrics.queues.labels("ready").set(sum(map(_is_ready, found)))
            first = self.last_sync is None
            for key in self.documents:
                if first:
                    self.work.add(key)
                else:  # spread, so that a thousand queues are no burst
                    loop.call_later(random.uniform(0, interval / 4), self.work.add, key)
            self.last_sync = loop.time()
            orphans = await asyncio.to_thread(self._certificates.users_left)
            for key in orphans - self.documents.keys():  # deleted while no operator ran
                self.work.add(key)
        except (ClusterError, NotFoundError) as error:
            logger.warning("cannot look through the queues: %s", error)

    def _look(self, key: Key) -> bool:
        began = time.monotonic()
        try:
            settled = self.reconcile(key)
        except ClusterError as error:
            logger.warning("queue %s/%s: %s", *key, error)
            return False
        self.metrics.reconcile.labels("yes" if settled else "no").observe(time.monotonic() - began)
        return settled

    def reconcile(self, key: Key) -> bool:
        """Blocking. Whether all that was to be written could be written."""
        document = self._cluster.queue(*key)
        if document is None or "deletionTimestamp" in document["metadata"]:
            self._certificates.forget(*key)
            return True  # its children go with it: they name it as their owner
        previous: dict[str, Any] = document.get("status", {})
        if self._is_kept_by_another(document):
            return True  # until the next look through all queues
        try:
            queue = queue_from(document, self._default_tls)
        except ConfigError as error:
            generation = document["metadata"].get("generation", 0)
            self._report(document, previous, refused_status(generation, str(error), previous, _now()))
            return True
        seen, queue = self._observe(queue, previous)
        holds_rows = known_use(queue, seen, previous) not in (None, "0")
        step = next_step(queue, self._images, seen.children, holds_rows, seen.used, seen.drained)
        if step.held and (running := previous.get("transport")) in ("tcp", "rdma"):
            queue = replace(queue, decided=replace(queue.decided or Transport("tcp"), protocol=running))
        if step.held:
            queue = replace(queue, tls=queue.running_tls)
        told = self._certificates.look_after(queue, seen.users, datetime.now(timezone.utc))
        children, refused = self._write(document, queue, step, seen.children, holds_rows)
        problems = [*step.problems, *told, *refused]
        seen = replace(seen, children=children, problems=problems, held=step.held)
        self._report(document, previous, queue_status(queue, seen, previous, _now()))
        return not problems and master_problem(queue, seen) is None

    def _observe(self, queue: Queue, previous: dict[str, Any]) -> tuple[Observation, Queue]:
        """What there is, and the queue with the transport that fits it."""
        cluster = self._cluster
        capacity, missing = self._capacity(queue)
        storage = previous.get("storage", {})
        same = previous.get("observedGeneration") == queue.generation
        running = previous.get("transport") if same else None
        working = bool(storage.get("ready")) and storage.get("ready") == storage.get("replicas")
        queue = replace(queue, decided=choose_transport(queue.spec, capacity, running, working, missing))
        if self.watched.complete:
            children = self.watched.children(queue.namespace, queue.name)
            pods = self.watched.pods(queue.namespace, queue.name)
        else:
            children = cluster.children(queue.namespace, queue.name)
            pods = cluster.pods(self._namespaces, queue.name)
        for manifest in wanted_children(queue, self._images):
            key = manifest["kind"], manifest["metadata"]["name"]
            # Also one without our labels. What belongs to something else may have gone since.
            if key not in children or foreign_owner(children[key], queue.uid):
                children.pop(key, None)
                if (found := cluster.child(manifest)) is not None:
                    children[key] = found
        users = [pod for pod in pods if _is_injected(pod, queue)]
        queue = replace(queue, etcd_data=etcd_data(queue, children, pods))
        usage = self._usage(queue, children)
        seen = Observation(
            children=children,
            pods=[pod for pod in pods if _is_part(pod, queue)],
            injected=len(users),
            users=frozenset(pod["metadata"]["namespace"] for pod in users),
            used=usage.used,
            drained=usage.drained,
        )
        return replace(seen, masters=master_group(queue, seen), checkpoint=checkpoint_report(queue, seen)), queue

    def _capacity(self, queue: Queue) -> tuple[int | None, str]:
        """RDMA devices for the queue, None if that is not known, and why there are none."""
        rdma = queue.spec.rdma
        if queue.spec.transport != "rdma":
            return None, ""
        if rdma.claim:
            return self._cluster.claimable(rdma.claim.device_class_name)
        return (self._cluster.offered(rdma.resource_name) if rdma.resource_name else None), ""

    def _write(
        self, document: Manifest, queue: Queue, step: Step, children: Children, holds_rows: bool
    ) -> tuple[Children, list[Problem]]:
        """Write what the step says. Gives the children as they are then, and what went wrong."""
        found, problems = dict(children), []
        for manifest in step.apply:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            try:
                applied = found[kind, name] = self._put(document, manifest, found.get((kind, name)), holds_rows)
                self.watched.put(kind, applied)
                self.metrics.writes.labels(kind).inc()
                logger.info("applied %s %s/%s", kind, queue.namespace, name)
            except StaleError:
                if (before := found.get((kind, name))) is not None:
                    self.watched.drop(kind, before)
                raise  # the next look sees what there is
            except ClusterError as error:
                problems.append(refusal(f"{kind} {name}", str(error)))
        for manifest in step.delete:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            try:
                self._check_leading()
                self._cluster.delete(manifest)
                self.watched.drop(kind, manifest)
                logger.info("deleted %s %s/%s", kind, queue.namespace, name)
            except ClusterError as error:
                problems.append(refusal(f"{kind} {name}", str(error)))
        if step.lost:
            self._tell_of(document, "RowsLost", queue.etcd_data, step.lost, good=False)
        for (kind, name), child in found.items():
            if kind == "StatefulSet" and child.get("status", {}).get("replicas", 0) < child["spec"].get("replicas", 1):
                try:
                    if words := self._cluster.refused_pods(child):
                        problems.append(refusal(f"{kind} {name}", words, "PodsRefused"))
                except ClusterError as error:
                    problems.append(refusal(f"events of {kind} {name}", str(error)))
        return found, problems

    def _put(self, document: Manifest, manifest: Manifest, before: Manifest | None, holds_rows: bool) -> Manifest:
        """Apply a child over what there was of it. Gives it as it is then; raises ClusterError."""
        what = f"{manifest['kind']} {manifest['metadata']['name']}"
        self._check_leading()
        try:
            paths = drift(manifest, before)
            if before is not None and (paths or managed_fields_cleared(before)):
                self._cluster.repair(manifest, before)
            applied = self._cluster.apply(manifest, before)
        except ImmutableError:
            if before is None or (manifest["kind"] in WORKLOADS and holds_rows):
                raise
            self._cluster.check_create(manifest)
            self._cluster.delete(before)
            applied = self._cluster.apply(manifest, None)
            words = f"{what} was deleted and made again: it had a value that cannot be changed in place."
            self._tell_of(document, "Recreated", what, words)
            return applied
        # A repair makes the operator own what it sets back, apart from apply. The next look ends that in silence.
        if paths and any(entry.get("manager") != MANAGER for entry in foreign_entries(before or {"metadata": {}})):
            listed = ", ".join(paths)
            words = (
                f"{what}: took back {listed}, which something else had set. To allow it, annotate the "
                f"{manifest['kind']} with {IGNORE_DRIFT_ANNOTATION}={','.join(paths)}"
            )
            self._tell_of(document, "DriftRepaired", f"{what} {listed}", words)
        elif managed_fields_cleared(before):
            words = f"{what}: its managedFields were cleared, so all of its fields were set back."
            self._tell_of(document, "DriftRepaired", what, words)
        if before is not None and not owned_by(before, document["metadata"]["uid"]):
            self._tell_of(document, "Adopted", what, f"{what} had lost its owner, and belongs to the queue again.")
        return applied

    def _tell_of(self, document: Manifest, reason: str, what: str, words: str, good: bool = True) -> None:
        """Create an event of a repair, which no condition reports."""
        news = {"type": f"{reason} {what}", "status": str(good), "reason": reason, "message": words}
        logger.warning("queue %s: %s", document["metadata"]["name"], words)
        try:
            self._cluster.create_event(event(document, {**news, "lastTransitionTime": _now()}, self._identity))
        except (ClusterError, NotFoundError) as error:
            logger.warning("no event of a repair: %s", error)

    def _is_kept_by_another(self, document: Manifest) -> bool:
        """Whether a living operator of another release keeps the queue. Two would undo each other's writes."""
        keeper, metadata = document.get("status", {}).get("operator", ""), document["metadata"]
        if not self._release or keeper in ("", self._release):
            return False
        try:
            if not is_held(self._cluster.lease(*keeper.split("/", 1)), datetime.now(timezone.utc)):
                return False
        except ClusterError:  # no right to see it, as with watchNamespaces
            return False
        if self._gate.admits(metadata["uid"], "OtherOperator", keeper):
            words = (
                f"The operator {self._release} leaves this queue to the operator {keeper}, which keeps it. Uninstall "
                "one of them, or give each namespaces of its own with the chart's watchNamespaces."
            )
            self._tell_of(document, "OtherOperator", self._release, words, good=False)
        return True

    def _check_leading(self) -> None:
        if not self._leading():
            raise ClusterError("another replica leads; it goes on with this")

    def _usage(self, queue: Queue, children: Children) -> Usage:
        deployment = children.get(("Deployment", queue.child("controller")), {})
        if not deployment.get("status", {}).get("readyReplicas"):
            return Usage()
        # Each controller hears of all that the units hold, though not in the same moment.
        return together(
            [storage_usage(f"http://{queue.host('controller')}:{port}/metrics") for port in queue.metrics_ports]
        )

    def _report(self, document: Manifest, previous: dict[str, Any], status: dict[str, Any]) -> None:
        if self._release:
            status = {**status, "operator": self._release}
        if status == previous:
            return
        self._check_leading()
        # Events first: once the status is written, the next look finds no news, and the answer to a write may be lost.
        self._tell(document, previous, status)
        metadata = document["metadata"]
        self._cluster.write_status(metadata["namespace"], metadata["name"], status)
        self.metrics.writes.labels("status").inc()

    def _tell(self, document: Manifest, previous: dict[str, Any], status: dict[str, Any]) -> None:
        """Emit events for the changes of the status."""
        metadata = document["metadata"]
        for condition in status["conditions"]:
            if not worth_an_event(condition, previous):
                continue
            news = (metadata["uid"], condition["type"], condition["status"], condition["reason"])
            sent = self._gate.admits(*news)
            self.metrics.events.labels("yes" if sent else "no").inc()
            if not sent:
                continue
            try:
                self._cluster.create_event(event(document, condition, self._identity))
            except (ClusterError, NotFoundError) as error:  # the condition says it too
                self._gate.forget(*news)
                logger.warning("no event %s for %s: %s", condition["reason"], metadata["name"], error)


def _kept(document: Manifest) -> Manifest:
    """Less what is large and never looked at."""
    document["metadata"].pop("managedFields", None)
    return document


def _is_ready(document: Manifest) -> bool:
    conditions = document.get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _is_part(pod: Manifest, queue: Queue) -> bool:
    metadata = pod["metadata"]
    own = metadata.get("annotations", {}).get(QUEUE_ANNOTATION) == queue.name
    return own and bool(metadata["namespace"] == queue.namespace)


def _is_injected(pod: Manifest, queue: Queue) -> bool:
    given = pod["metadata"].get("annotations", {}).get(INJECTED_ANNOTATION) == f"{queue.namespace}/{queue.name}"
    return given and pod.get("status", {}).get("phase") not in _FINISHED


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
