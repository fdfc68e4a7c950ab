"""Children and pods of queues as watches and own writes told of them, so that a look at a queue need not ask again.

A newer version of an object replaces an older one, whichever way it comes. Watches lose deletions while they are
interrupted, and tell nothing of kinds that are only listed: a list of everything, at each resync, corrects that. Until
the first one nothing here is to be used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tq_operator.plan.drift import foreign_entries
from tq_operator.plan.names import INJECTED_ANNOTATION, MANAGED_BY, MANAGER, QUEUE_ANNOTATION, QUEUE_LABEL, label_value
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import CHILD_KINDS, POD, UNWATCHED, Cluster

__all__ = ["Key", "Watched", "key_of", "queues_of"]

Key = tuple[str, str]
"""Namespace and name: of a queue, or of an object of some kind."""


class _Entry(NamedTuple):
    version: int
    queues: frozenset[Key]
    """Those it belongs to, by namespace and label: it is found by them."""
    text: str
    """What is needed of the object, as JSON: much smaller than as Python objects."""


@dataclass
class _Kind:
    entries: dict[Key, _Entry] = field(default_factory=dict)
    of_queue: dict[Key, set[Key]] = field(default_factory=dict)
    ended: dict[Key, int] = field(default_factory=dict)
    """Objects that were deleted after the last list, with the version of that."""
    listed: int = 0
    """Version of the last list. What it lacks and is not newer is no more."""


class Watched:
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds = {kind: _Kind() for kind in (*CHILD_KINDS, POD)}
        self._expired = 0
        self.complete = False
        """Whether everything is known, so that it can be read here."""

    def expire(self) -> None:
        """Do not use the known objects until the next listing."""
        with self._lock:
            self._expired += 1
            self.complete = False

    def children(self, namespace: str, queue: str) -> dict[tuple[str, str], Manifest]:
        """As Cluster.children, less what changes with each write and says nothing."""
        texts = [text for kind in CHILD_KINDS for text in self._texts(kind, namespace, queue)]
        found = [json.loads(text) for text in texts]
        return {(child["kind"], child["metadata"]["name"]): child for child in found}

    def pods(self, namespace: str, queue: str) -> list[Manifest]:
        """Pods of the queue's parts, and, with no more of their status than the phase, those that were given it."""
        return [json.loads(text) for text in self._texts(POD, namespace, queue)]

    def _texts(self, kind: str, namespace: str, queue: str) -> list[str]:
        with self._lock:
            known = self._kinds[kind]
            chosen = known.of_queue.get((namespace, label_value(queue)), ())
            return [known.entries[key].text for key in sorted(chosen)]

    def take(self, kind: str, event: Mapping[str, Any]) -> set[Key]:
        """Take up an event of a watch. Gives the queues that it is news for."""
        item = event["object"]
        if event.get("type") == "DELETED":
            return self._end(kind, item)
        before = self._known_of(kind, item)  # somebody may have changed the annotation that names the queue
        return before | queues_of(item) if self.put(kind, item) or kind != POD else set()

    def _known_of(self, kind: str, item: Manifest) -> set[Key]:
        with self._lock:
            entry = self._kinds[kind].entries.get(key_of(item))
        if entry is None or entry.queues == {(namespace, label_value(name)) for namespace, name in queues_of(item)}:
            return set()
        return queues_of(json.loads(entry.text))

    def put(self, kind: str, item: Manifest, *, listed: bool = False) -> bool:
        """Take up an object that the apiserver gave. Whether it says something new."""
        key, version = key_of(item), int(item["metadata"]["resourceVersion"])
        with self._lock:
            known = self._kinds[kind]
            old = known.entries.get(key)
            if version <= known.ended.get(key, 0) or (old is not None and version < old.version):
                return False
            if old is None and version <= known.listed and not listed:
                return False
            queues = _indexed_by(kind, item)
            text = json.dumps(_needed(kind, item)) if queues else ""
            if old is not None:
                _forget(known, key)
            if queues:
                known.entries[key] = _Entry(version, queues, text)
                for queue in queues:
                    known.of_queue.setdefault(queue, set()).add(key)
            return text != (old.text if old is not None else "")

    def _end(self, kind: str, item: Manifest) -> set[Key]:
        key, version = key_of(item), int(item["metadata"]["resourceVersion"])
        with self._lock:
            known = self._kinds[kind]
            if (old := known.entries.get(key)) is not None and old.version <= version:
                _forget(known, key)
            known.ended[key] = max(version, known.ended.get(key, 0))
        return queues_of(item)

    def drop(self, kind: str, item: Manifest) -> None:
        """It was deleted from here, of which no watch tells for kinds that are only listed."""
        with self._lock:
            known, key = self._kinds[kind], key_of(item)
            if kind in UNWATCHED and key in known.entries:
                _forget(known, key)

    def _keep(self, kind: str, listed: Collection[Key], version: int) -> set[Key]:
        """Forget what a list of ``version`` does not have. Gives the queues that it belonged to."""
        news: set[Key] = set()
        with self._lock:
            known = self._kinds[kind]
            for key in [key for key, entry in known.entries.items() if entry.version <= version and key not in listed]:
                news |= queues_of(json.loads(known.entries[key].text))
                _forget(known, key)
            known.listed = max(version, known.listed)
            known.ended = {key: end for key, end in known.ended.items() if end > version}
        return news

    def sync(self, cluster: Cluster, namespaces: tuple[str, ...]) -> set[Key]:
        """Blocking. List everything. Gives the queues for which that brought news; raises ClusterError."""
        news: set[Key] = set()
        began, complete = self._expired, False
        try:
            for kind in self._kinds:
                listed: set[Key] = set()
                versions = []
                for items, version in cluster.pages(kind, namespaces):
                    versions.append(version)
                    for item in items:
                        listed.add(key_of(item))
                        if self.put(kind, item, listed=True):
                            news |= queues_of(item)
                if versions:  # of a kind that the cluster knows
                    news |= self._keep(kind, listed, min(versions))
            complete = True
        finally:
            with self._lock:
                self.complete = complete and began == self._expired
        return news


def queues_of(item: Manifest) -> set[Key]:
    """Whom a child or pod may be news for: by its annotations, as labels are too short for names."""
    metadata = item["metadata"]
    annotations = metadata.get("annotations", {})
    found: set[Key] = set()
    if name := annotations.get(QUEUE_ANNOTATION):
        found.add((metadata["namespace"], name))
    owner, separator, name = annotations.get(INJECTED_ANNOTATION, "").partition("/")
    if separator:
        found.add((owner, name))
    return found


def _indexed_by(kind: str, item: Manifest) -> frozenset[Key]:
    """What Cluster.children and Cluster.pods find it by; of a pod only what makes a part or a user of a queue."""
    metadata = item["metadata"]
    labels = metadata.get("labels", {})
    label = labels.get(QUEUE_LABEL)
    if label is None:
        return frozenset()
    if kind == POD:
        return frozenset((namespace, label) for namespace, name in queues_of(item) if label_value(name) == label)
    ours = labels.get(MANAGED_BY) == MANAGER
    return frozenset({(metadata["namespace"], label)} if ours else ())


def _needed(kind: str, item: Manifest) -> Manifest:
    metadata = item["metadata"]
    if kind != POD:
        rest = {name: value for name, value in metadata.items() if name not in ("managedFields", "resourceVersion")}
        others = foreign_entries(item)
        if others or not metadata.get("managedFields"):
            rest["managedFields"] = others
        return {**item, "metadata": rest}
    annotations = metadata.get("annotations", {})
    names = ["name", "namespace", "uid", "labels", "deletionTimestamp"]
    marks = {name: annotations[name] for name in (QUEUE_ANNOTATION, INJECTED_ANNOTATION) if name in annotations}
    status = item.get("status", {})
    if QUEUE_ANNOTATION not in annotations:
        names, status = names[:3], {name: status[name] for name in ("phase",) if name in status}
    kept = {name: metadata[name] for name in names if name in metadata}
    return {"metadata": {**kept, "annotations": marks}, "status": status}


def key_of(item: Manifest) -> Key:
    """Namespace and name."""
    return item["metadata"]["namespace"], item["metadata"]["name"]


def _forget(known: _Kind, key: Key) -> None:
    for queue in known.entries.pop(key).queues:
        chosen = known.of_queue[queue]
        chosen.discard(key)
        if not chosen:
            del known.of_queue[queue]
