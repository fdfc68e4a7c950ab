"""A second actor that changes the children of queues at random, and what they have to look like afterwards."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tests.waiting import meanwhile
from tq_operator.plan.difference import APPLIED_ANNOTATION
from tq_operator.plan.names import MANAGED_BY, MANAGER, label_value
from tq_operator.plan.queue import Manifest
from tq_operator.plan.step import Children
from tq_operator.runtime.cluster import CHILD_KINDS, Cluster, ClusterError

Path = tuple[str | int, ...]

QUEUES = {
    "plain": "{backend: {simple: {}}, controller: {durability: node, shards: 2}, security: {networkPolicy: true}}",
    "cold": "{backend: {mooncake: {protocol: tcp, globalSegmentSize: 256Mi}}, security: {tls: {mode: operator}}}",
}
"""Specs by name: a journal, several controllers and a NetworkPolicy; masters and certificates."""
BACK_S = 30.0
"""Within which children are as the queue wants them."""

_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "type": ("ClusterIP", "NodePort", "Recreate", "RollingUpdate", "OnDelete"),
    "protocol": ("UDP", "TCP"),
    "imagePullPolicy": ("Always", "Never"),
    "restartPolicy": ("Always",),
    "dnsPolicy": ("Default", "ClusterFirst"),
    "podManagementPolicy": ("OrderedReady",),
    "sessionAffinity": ("ClientIP",),
    "medium": ("", "Memory"),
    "sizeLimit": ("1Mi", "1Gi"),
    "memory": ("100Mi", "3Gi"),
    "cpu": ("200m",),
    "storage": ("3Gi",),
    "unhealthyPodEvictionPolicy": ("IfHealthyBudget",),
    "whenUnsatisfiable": ("DoNotSchedule",),
    "internalTrafficPolicy": ("Local",),
}
"""Other valid values of fields that take few."""
_POD = {
    "hostNetwork": True,
    "hostPID": True,
    "shareProcessNamespace": True,
    "schedulerName": "other",
    "activeDeadlineSeconds": 5,
    "nodeName": "elsewhere",
    "serviceAccountName": "other",
    "hostname": "other",
    "hostAliases": [{"ip": "192.0.2.1", "hostnames": ["a"]}],
    "nodeSelector": {"disk": "none"},
    "tolerations": [{"operator": "Exists"}],
    "imagePullSecrets": [{"name": "other"}],
    "initContainers": [{"name": "foreign", "image": "foreign:1"}],
    "dnsConfig": {"nameservers": ["192.0.2.1"]},
    "affinity": {"nodeAffinity": {}},
    "runtimeClassName": "other",
}
_CONTAINER = {
    "tty": True,
    "stdin": True,
    "args": ["foreign"],
    "workingDir": "/foreign",
    "envFrom": [{"configMapRef": {"name": "foreign"}}],
    "lifecycle": {"postStart": {"exec": {"command": ["foreign"]}}},
    "terminationMessagePath": "/foreign",
}
_ADDED: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("Service", "spec"): {
        "externalIPs": ["203.0.113.9"],
        "sessionAffinity": "ClientIP",
        "type": "NodePort",
        "publishNotReadyAddresses": True,
        "internalTrafficPolicy": "Local",
        "trafficDistribution": "PreferClose",
    },
    ("Deployment", "spec"): {"paused": True, "minReadySeconds": 100, "progressDeadlineSeconds": 999},
    ("StatefulSet", "spec"): {
        "updateStrategy": {"type": "OnDelete"},
        "minReadySeconds": 100,
        "ordinals": {"start": 1},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Delete"},
    },
    ("NetworkPolicy", "spec"): {"egress": [{}], "policyTypes": ["Ingress", "Egress"]},
    ("ConfigMap",): {"immutable": True, "binaryData": {"foreign": "AA=="}},
}
"""Fields that may be added, by the kind and the path."""
_ALLOCATED = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "volumeName")


def wanted(child: Manifest) -> Manifest:
    """What a child has to keep, in a form that can be compared: its content, and metadata that the operator sets."""
    found = {name: copy.deepcopy(child[name]) for name in ("spec", "data", "binaryData", "immutable") if name in child}
    for name in _ALLOCATED:
        found.get("spec", {}).pop(name, None)
    if found.get("spec", {}).get("updateStrategy") == {"type": "RollingUpdate"}:
        # A default that was removed: the apiserver does not fill it in again, and it means the same.
        found["spec"]["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    template = found.get("spec", {}).get("template", {}).pop("metadata", {})
    metadata = child["metadata"]
    marks = {
        f"{where} {kind} {name}": value
        for where, of in (("", metadata), ("template", template))
        for kind in ("labels", "annotations")
        for name, value in (of.get(kind) or {}).items()
        if name not in ("deployment.kubernetes.io/revision", APPLIED_ANNOTATION)
    }
    return {**found, "marks": marks, "owners": [each["uid"] for each in metadata.get("ownerReferences") or []]}


def missing(before: Mapping[tuple[str, str], Manifest], now: Children) -> str:
    """The first child that is not as it was ``before``, with the difference; empty if all are. Labels and annotations
    of others may stay."""
    for key, old in before.items():
        if key not in now:
            return f"{' '.join(key)} does not exist"
        new = wanted(now[key])
        for name, value in old.items():
            same = value.items() <= new[name].items() if name == "marks" else value == new.get(name)
            if not same:
                return f"{' '.join(key)}: {name} is {new.get(name)}, not {value}"
        if more := new.keys() - old.keys():
            return f"{' '.join(key)} has {sorted(more)}"
    return ""


@dataclass
class Actor:
    """Changes children of queues, as somebody with all rights and no knowledge of the operator."""

    cluster: Cluster
    rng: random.Random
    refused: int = 0
    """Changes that the apiserver did not accept."""
    made: list[str] = field(default_factory=list)

    def change(self, namespace: str, queue: str) -> str:
        """Make one change that the apiserver accepts. Gives it in words."""
        while True:
            children = self.cluster.children(namespace, queue)
            kind, name = self.rng.choice(sorted(key for key in children if not _of_a_pod(children[key])))
            child, path = children[kind, name], f"{CHILD_KINDS[kind][0]}/namespaces/{namespace}/{CHILD_KINDS[kind][1]}/"
            words, new = self._changed(copy.deepcopy(child))
            try:
                if new is None:
                    self.cluster.call("DELETE", path + name)
                elif self.rng.random() < 0.3:
                    words += " (applied)"
                    self.cluster.call("PATCH", path + name, _plain(new), _FORCED, "application/apply-patch+yaml")
                else:
                    answer = self.cluster.call("PUT", path + name, new, [("fieldManager", "kubectl-edit")])
                    if answer["metadata"]["resourceVersion"] == child["metadata"]["resourceVersion"]:
                        continue  # nothing that the apiserver keeps
            except (ClusterError, ConflictError, NotFoundError):
                self.refused += 1
                continue
            self.made.append(f"{kind} {name}: {words}")
            return self.made[-1]

    def _changed(self, child: Manifest) -> tuple[str, Manifest | None]:
        turn, metadata = self.rng.random(), child["metadata"]
        if turn < 0.05:
            return "deleted", None
        if turn < 0.09:
            metadata.pop("ownerReferences", None)
            return "ownerReferences removed", child
        if turn < 0.12:
            metadata["managedFields"] = [{}]
            return "managedFields cleared", child
        if turn < 0.18:
            marks = metadata.get(self.rng.choice(("labels", "annotations"))) or {"none": ""}
            name = self.rng.choice(sorted(marks))
            if self.rng.random() < 0.5:
                del marks[name]
                return f"{name} removed", child
            marks[name] = "foreign"
            return f"{name} changed", child
        return self._content(child), child

    def _content(self, child: Manifest) -> str:
        root = "spec" if "spec" in child else "data"
        paths = list(_paths(child[root], (root,)))
        if root == "data":
            paths.append(())
        path = self.rng.choice(paths)
        target = _at(child, path)
        turn = self.rng.random()
        if isinstance(target, dict) and turn < 0.7:
            name, value = self.rng.choice(sorted(self._addable(child["kind"], path).items()))
            target[name] = value
            return f"{_words(path)}.{name} added"
        if isinstance(target, list) and target and turn < 0.7:
            entry = copy.deepcopy(self.rng.choice(target))
            target.insert(self.rng.randrange(len(target) + 1), _other(entry))
            return f"entry of {_words(path)} added"
        if not path:
            return "nothing"
        parent, last = _at(child, path[:-1]), path[-1]
        if turn < 0.85 and not isinstance(target, dict | list):
            parent[last] = self.rng.choice(_OTHERS.get(str(last), (_other(target),)))
            return f"{_words(path)} = {parent[last]!r}"[:120]
        del parent[last]
        return f"{_words(path)} removed"

    def _addable(self, kind: str, path: Path) -> Mapping[str, Any]:
        if path[-1:] == ("spec",) and "template" in path:
            return _POD
        if len(path) > 2 and path[-2] == "containers":
            return _CONTAINER
        return _ADDED.get((kind, *map(str, path)), {"foreign": "yes"})


TOLD_S = 3.0
_FORCED = [("fieldManager", "foreign"), ("force", "true")]


def _plain(child: Manifest) -> Manifest:
    """As somebody would apply it who has read it."""
    kept = {name: child["metadata"][name] for name in ("name", "labels", "annotations") if name in child["metadata"]}
    return {**{name: value for name, value in child.items() if name != "status"}, "metadata": kept}


def _paths(value: Any, path: Path) -> Iterator[Path]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in entries:
        yield from _paths(inner, (*path, name))


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _words(path: Path) -> str:
    return ".".join(map(str, path))


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):  # an entry of a list: under another name
        keys = [key for key in ("name", "key", "mountPath", "port", "containerPort", "path") if key in value]
        return {**value, **{key: _other(value[key]) for key in keys}}
    return f"{value}x" if isinstance(value, str) else value


NODE = "pretended"


class _Kubelet:
    """Runs nothing, but says of all pods of a namespace that they are ready, and ends those that are deleted."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._number = 0
        self._beat = 0.0

    def look(self) -> None:
        """Do what is to be done for the node and its pods."""
        if time.monotonic() > self._beat:
            self._beat = time.monotonic() + 5
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            ready = {"type": "Ready", "status": "True", "reason": "Pretended", "lastHeartbeatTime": now}
            self._patch(f"/api/v1/nodes/{NODE}/status", {"status": {"conditions": [ready]}})
        for pod in self._cluster.call("GET", self._pods)["items"]:
            with suppress(NotFoundError, ConflictError):
                self._look_at(pod)

    def _look_at(self, pod: Manifest) -> None:
        path = f"{self._pods}/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self._cluster.call("DELETE", path, {"gracePeriodSeconds": 0})
        elif "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
            self._cluster.call("POST", f"{path}/binding", {**binding, "target": target})
        elif pod["status"].get("phase") != "Running":
            self._number += 1
            address = f"198.18.{self._number // 250 % 250}.{self._number % 250 + 1}"
            state = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
            about = {"ready": True, "restartCount": 0, "image": "x", "imageID": "x", "state": state}
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")],
                "containerStatuses": [{"name": each["name"], **about} for each in pod["spec"]["containers"]],
            }
            self._patch(f"{path}/status", {"status": status})

    def _patch(self, path: str, change: Manifest) -> None:
        self._cluster.call("PATCH", path, change, None, "application/merge-patch+json")


@contextmanager
def kubelet(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Have every pod of the namespace be ready, on a control plane that has no nodes."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    cluster.call("POST", "/api/v1/nodes", node)
    one = _Kubelet(cluster, namespace)

    def work() -> None:
        with suppress(ClusterError):
            one.look()

    try:
        with meanwhile(work, 0.2):
            yield
    finally:
        cluster.call("DELETE", f"/api/v1/nodes/{NODE}")


@dataclass
class Watcher:
    """Somebody outside who checks that a Service leads to pods while its queue is Ready."""

    longest_s: float = 0.0
    """For which a queue was Ready with a Service that had no ready endpoint."""
    worst: str = ""

    @contextmanager
    def watching(self, cluster: Cluster, namespace: str) -> Iterator[None]:
        since = dict[str, float]()

        def work() -> None:
            with suppress(ClusterError, NotFoundError):
                astray = empty_services(cluster, namespace)
                for name in since.keys() - astray:
                    if (lasted := time.monotonic() - since.pop(name)) > TOLD_S:
                        print(f"{time.strftime('%H:%M:%S')} {name} had no endpoint for {lasted:.1f} s", flush=True)
                for name in astray:
                    lasted = time.monotonic() - since.setdefault(name, time.monotonic())
                    if lasted > self.longest_s:
                        self.longest_s, self.worst = lasted, name

        with meanwhile(work, 0.2):
            yield


def is_ready(queue: Manifest) -> bool:
    conditions = queue.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def empty_services(cluster: Cluster, namespace: str) -> set[str]:
    """Services of Ready queues without a ready endpoint, or that do not exist."""
    slices = cluster.call("GET", f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")["items"]
    led = {
        each["metadata"]["labels"].get("kubernetes.io/service-name")
        for each in slices
        if any(point.get("conditions", {}).get("ready") for point in each.get("endpoints") or [])
    }
    found = set()
    for queue in cluster.queues([namespace]):
        if is_ready(queue):
            name = queue["metadata"]["name"]
            found |= {f"{name}-{part}" for part in ("controller", "storage")} - led
    return found


def children_of(cluster: Cluster, namespace: str, queue: str) -> dict[tuple[str, str], Manifest]:
    """The children with all that they have to keep."""
    ours = {MANAGED_BY: MANAGER, "transferqueue.io/queue": label_value(queue)}.items()
    found = cluster.children(namespace, queue)
    return {
        key: wanted(child)
        for key, child in found.items()
        if ours <= child["metadata"]["labels"].items() and not _of_a_pod(child)
    }


def _of_a_pod(child: Manifest) -> bool:
    """Whether it is the claim of a pod of a StatefulSet, which is Kubernetes' own."""
    return child["kind"] == "PersistentVolumeClaim" and child["metadata"]["name"].startswith("arena-")


def until_back(
    cluster: Cluster, namespace: str, queue: str, before: Mapping[tuple[str, str], Manifest], seconds: float
) -> str:
    """Wait until all children are as ``before``. Gives what is not after so many seconds."""
    deadline = time.monotonic() + seconds
    while why := missing(before, cluster.children(namespace, queue)):
        if time.monotonic() > deadline:
            return why
        time.sleep(0.1)
    return ""
