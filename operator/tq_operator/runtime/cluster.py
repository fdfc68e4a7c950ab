"""The few calls to the apiserver that the operator makes. Blocking: they run on worker threads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kubernetes import client
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, DynamicApiError, NotFoundError
from urllib3.exceptions import HTTPError

from tq_operator.api.binding import BINDING_KIND, BINDING_PLURAL
from tq_operator.api.crd import PLURAL
from tq_operator.api.node import NODE_KIND, NODE_PLURAL
from tq_operator.plan.drift import repair
from tq_operator.plan.names import INJECT_LABEL, MANAGED_BY, MANAGER, QUEUE_LABEL, label_value, selector
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import API_VERSION, GROUP, KIND, VERSION
from transfer_queue.config.quantity import amount

__all__ = [
    "CHILD_KINDS",
    "POD",
    "UNWATCHED",
    "Cluster",
    "ClusterError",
    "ForbiddenError",
    "ImmutableError",
    "StaleError",
]

CHILD_KINDS: Mapping[str, tuple[str, str]] = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Service": ("/api/v1", "services"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
}
"""Kind -> (path of the API, plural)."""
UNWATCHED = ("ResourceClaimTemplate",)
"""Kinds that older clusters do not know, so that they are only listed; there are none where they are unknown."""
POD = "Pod"
_KINDS = {
    **CHILD_KINDS,
    POD: ("/api/v1", "pods"),
    "Secret": ("/api/v1", "secrets"),
    "Certificate": ("/apis/cert-manager.io/v1", "certificates"),
}
_IMMUTABLE = ("immutable", "may not change once set", "updates to statefulset spec")
"""Text of the apiserver for a change of an immutable field."""
_OTHER_UID = "metadata.uid"
"""Text of the apiserver if the object has another uid than the applied one."""
_NO_VERSION = "1"
"""A resourceVersion that no object has."""
_QUEUES = f"/apis/{GROUP}/{VERSION}"
_PAGE = 100
"""Objects of a list that are read at once: admission waits while one is decoded."""
_TIMEOUT = (5.0, 30.0)  # seconds to connect, seconds between bytes


class ClusterError(Exception):
    """The apiserver refused a call or did not answer; the text is its own message."""


class ImmutableError(ClusterError):
    """The object has a value that cannot be changed."""


class StaleError(ClusterError):
    """The object is not the one that was seen: somebody made, deleted or replaced it since."""


class ForbiddenError(ClusterError):
    """The operator lacks the right to the call, or a rule of the cluster forbids it to everybody."""


class Cluster:
    """Calls with the credentials of the pod, or of the kubeconfig of the environment."""

    def __init__(self, api: client.ApiClient) -> None:
        # Every path is known, so the discovery that a DynamicClient starts with is left out.
        self._client: Any = DynamicClient(api, discoverer=lambda *_: None)  # type: ignore[no-untyped-call]

    def queue(self, namespace: str, name: str) -> Manifest | None:
        return self._get(f"{_QUEUES}/namespaces/{namespace}/{PLURAL}/{name}")

    def lease(self, namespace: str, name: str) -> Manifest | None:
        return self._get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")

    def queues(self, namespaces: Sequence[str]) -> list[Manifest]:
        """All queues of the namespaces; of every namespace if there are none given."""
        paths = [f"{_QUEUES}/namespaces/{name}/{PLURAL}" for name in namespaces] or [f"{_QUEUES}/{PLURAL}"]
        return [item for path in paths for items, _ in self._pages(path, "") for item in items]

    def pages(self, kind: str, namespaces: Sequence[str]) -> Iterator[tuple[list[Manifest], int]]:
        """Children of ``kind``, or pods, of all queues, some at a time; each with the resourceVersion of its list."""
        prefix, plural = _KINDS[kind]
        paths = [f"{prefix}/namespaces/{name}/{plural}" for name in namespaces] or [f"{prefix}/{plural}"]
        chosen = QUEUE_LABEL if kind == POD else f"{MANAGED_BY}={MANAGER},{QUEUE_LABEL}"
        with _where_served(kind):
            for path in paths:
                for items, version in self._pages(path, chosen):
                    yield [{"apiVersion": _api_version(prefix), "kind": kind, **item} for item in items], version

    def children(self, namespace: str, queue: str) -> dict[tuple[str, str], Manifest]:
        """Children of a queue by (kind, name)."""
        chosen = _text(selector(queue))
        found = {}
        for kind, (prefix, plural) in CHILD_KINDS.items():
            with _where_served(kind):
                for item in self._list(f"{prefix}/namespaces/{namespace}/{plural}", chosen, recent=True):
                    # Entries of a list do not say what they are, and the apiserver leaves out an empty list.
                    item["metadata"].setdefault("managedFields", [])
                    found[kind, item["metadata"]["name"]] = {"apiVersion": _api_version(prefix), "kind": kind, **item}
        return found

    def child(self, manifest: Manifest) -> Manifest | None:
        """The object that has the name of ``manifest``, whoever owns it."""
        return self._get(_path(manifest))

    def pods(self, namespaces: Sequence[str], queue: str) -> list[Manifest]:
        """Pods of a queue's parts and pods that were given the queue."""
        paths = [f"/api/v1/namespaces/{name}/pods" for name in namespaces] or ["/api/v1/pods"]
        chosen = f"{QUEUE_LABEL}={label_value(queue)}"
        return [item for path in paths for item in self._list(path, chosen, recent=True)]

    def labelled(self, kind: str, namespaces: Sequence[str], labels: Mapping[str, str]) -> list[Manifest]:
        """Objects of ``kind`` with these labels; none of a kind that the apiserver does not know."""
        prefix, plural = _KINDS[kind]
        paths = [f"{prefix}/namespaces/{name}/{plural}" for name in namespaces] or [f"{prefix}/{plural}"]
        try:
            found = [item for path in paths for item in self._list(path, _text(labels))]
        except NotFoundError:
            return []
        return [{"apiVersion": _api_version(prefix), "kind": kind, **item} for item in found]

    def apply(self, manifest: Manifest, seen: Manifest | None) -> Manifest:
        """Server-side apply over the object ``seen``; fields that others set by hand are taken back.

        None: there is no such object yet. Raises StaleError, and writes nothing, if that is no longer so.
        """
        # No object that exists has the resourceVersion 1, and none that does not exist has a uid.
        known = {"uid": seen["metadata"]["uid"]} if seen else {"resourceVersion": _NO_VERSION}
        return self._apply(_path(manifest), {**manifest, "metadata": {**manifest["metadata"], **known}})

    def check_create(self, manifest: Manifest) -> None:
        """Raise ClusterError if the apiserver would refuse to create the object under a free name."""
        query = [("fieldManager", MANAGER), ("dryRun", "All")]
        try:
            self.call("POST", _path(manifest).rpartition("/")[0], manifest, query)
        except ConflictError:  # valid, and the name is taken
            return
        except NotFoundError as error:
            raise ClusterError(_words(error)) from None
        except ForbiddenError as error:
            if "exceeded quota" not in str(error):  # which the object that is there uses up
                raise

    def repair(self, manifest: Manifest, seen: Manifest) -> None:
        """Remove from the object ``seen`` what others added to it. Raises StaleError if it is another one by now."""
        live = self.child(manifest)
        if live is None or live["metadata"]["uid"] != seen["metadata"]["uid"]:
            raise StaleError(f"{manifest['kind']} {manifest['metadata']['name']} was deleted or replaced")
        live["metadata"].setdefault("managedFields", [])  # the apiserver leaves out an empty list
        query = [("fieldManager", MANAGER)]
        try:
            self.call("PATCH", _path(manifest), repair(manifest, live), query, "application/json-patch+json")
        except (NotFoundError, ConflictError) as error:
            raise ClusterError(_words(error)) from None

    def delete(self, manifest: Manifest) -> None:
        """Delete this very object, not one that has taken its name since."""
        options = {"preconditions": {"uid": manifest["metadata"]["uid"]}, "propagationPolicy": "Background"}
        try:
            self.call("DELETE", _path(manifest), options)
        except (NotFoundError, ConflictError):
            return

    def offered(self, resource: str) -> int | None:
        """Devices of an extended resource on all nodes together; None without the right to read nodes."""
        try:
            nodes = self._list("/api/v1/nodes", recent=True)
        except ForbiddenError:
            return None
        return sum(int(amount(node.get("status", {}).get("allocatable", {}).get(resource, "0"))) for node in nodes)

    def claimable(self, device_class: str) -> tuple[int | None, str]:
        """Devices that ResourceSlices list, None without the right to read them, and why there are none.

        All devices, not only those that the class selects; none without the DeviceClass.
        """
        api = "/apis/resource.k8s.io/v1"
        try:
            if self._get(api) is None:
                return 0, "the cluster does not serve resource.k8s.io/v1, which Kubernetes 1.34 and later have"
            if self._get(f"{api}/deviceclasses/{device_class}") is None:
                return 0, f"DeviceClass {device_class} does not exist; check the DRA driver and the name"
            slices = self._list(f"{api}/resourceslices", recent=True)
        except ForbiddenError:
            return None, ""
        count = sum(len(entry["spec"].get("devices") or []) for entry in slices)
        return count, "" if count else "no ResourceSlice lists a device; check that the DRA driver runs"

    def refused_pods(self, owner: Manifest) -> str:
        """Why the latest pod of a StatefulSet could not be made, which only an event says; empty if none was."""
        metadata = owner["metadata"]
        fields = f"involvedObject.uid={metadata['uid']},reason=FailedCreate"
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        found = self.call("GET", path, query=[("fieldSelector", fields)])["items"]
        latest = max(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")), default=None)
        return str(latest["message"]) if latest else ""

    def bindings(self, namespaces: Sequence[str]) -> list[Manifest]:
        """All TransferQueueBindings of the namespaces; of every namespace if there are none given."""
        paths = [f"{_QUEUES}/namespaces/{name}/{BINDING_PLURAL}" for name in namespaces]
        found = [item for path in paths or [f"{_QUEUES}/{BINDING_PLURAL}"] for item in self._list(path)]
        # Entries of a list do not say what they are.
        return [{"apiVersion": API_VERSION, "kind": BINDING_KIND, **item} for item in found]

    def missed_pods(self, namespaces: Sequence[str]) -> list[Manifest]:
        """Pods that ask for a queue by label and were not injected, which would have labelled them with it."""
        paths = [f"/api/v1/namespaces/{name}/pods" for name in namespaces] or ["/api/v1/pods"]
        return [item for path in paths for item in self._list(path, f"{INJECT_LABEL},!{QUEUE_LABEL}")]

    def write_status(
        self, namespace: str, name: str, status: Mapping[str, Any], kind: str = KIND, plural: str = PLURAL
    ) -> None:
        document = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "status": status}
        self._apply(f"{_QUEUES}/namespaces/{namespace}/{plural}/{name}/status", document)

    def node_report(self, name: str) -> Manifest | None:
        return self._get(f"{_QUEUES}/{NODE_PLURAL}/{name}")

    def node(self, name: str) -> Manifest | None:
        return self._get(f"/api/v1/nodes/{name}")

    def write_node_report(self, node: Manifest, status: Mapping[str, Any]) -> None:
        """Make the report of ``node``, which it ends with, or bring it up to date."""
        metadata = node["metadata"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": metadata["name"], "uid": metadata["uid"]}
        head = {"apiVersion": API_VERSION, "kind": NODE_KIND}
        path = f"{_QUEUES}/{NODE_PLURAL}/{metadata['name']}"
        self._apply(path, {**head, "metadata": {"name": metadata["name"], "ownerReferences": [owner]}})
        self._apply(f"{path}/status", {**head, "metadata": {"name": metadata["name"]}, "status": status})

    def create_event(self, event: Manifest) -> None:
        """Create an events.k8s.io event; one of that name already there is left as it is."""
        namespace = event["metadata"]["namespace"]
        try:
            self.call("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event)
        except ConflictError:
            return

    def _get(self, path: str) -> Manifest | None:
        try:
            return self.call("GET", path)
        except NotFoundError:
            return None

    def _list(self, path: str, chosen: str = "", *, recent: bool = False) -> list[Manifest]:
        """``recent``: what the apiserver has in its cache, as watches show it, without a round through etcd."""
        query = [("labelSelector", chosen)] if chosen else []
        if recent:
            query.append(("resourceVersion", "0"))
        items: list[Manifest] = self.call("GET", path, query=query)["items"]
        return items

    def _pages(self, path: str, chosen: str) -> Iterator[tuple[list[Manifest], int]]:
        query = [("limit", str(_PAGE)), *([("labelSelector", chosen)] if chosen else [])]
        following: list[tuple[str, str]] = []
        while True:
            page = self.call("GET", path, query=[*query, *following])
            yield page["items"], int(page["metadata"]["resourceVersion"])
            if not (token := page["metadata"].get("continue")):
                return
            following = [("continue", token)]

    def _apply(self, path: str, manifest: Manifest) -> Manifest:
        query = [("fieldManager", MANAGER), ("force", "true")]
        try:
            return self.call("PATCH", path, manifest, query, "application/apply-patch+yaml")
        except ConflictError as error:
            raise StaleError(_words(error)) from None
        except NotFoundError as error:
            raise ClusterError(_words(error)) from None

    def call(
        self,
        method: str,
        path: str,
        body: Manifest | list[Manifest] | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """Raises NotFoundError, ConflictError; ClusterError for all else."""
        found: Manifest = json.loads(self._answer(method, path, body, query, content_type))
        return found

    def read(self, path: str, query: list[tuple[str, str]] | None = None) -> str:
        """What is no object: a log, the metrics of a pod. Raises as ``call``."""
        return self._answer("GET", path, None, query, "application/json").decode(errors="replace")

    def _answer(
        self,
        method: str,
        path: str,
        body: Manifest | list[Manifest] | None,
        query: list[tuple[str, str]] | None,
        content_type: str,
    ) -> bytes:
        try:
            answer = self._client.request(
                method,
                path,
                body=body,
                query_params=query or [],
                content_type=content_type,
                serialize=False,
                _request_timeout=_TIMEOUT,
            )
        except (NotFoundError, ConflictError):
            raise
        except DynamicApiError as error:
            words = _words(error)
            kind = ForbiddenError if error.status == 403 else ClusterError
            if error.status == 422 and _OTHER_UID in words:
                kind = StaleError
            elif error.status == 422 and any(text in words for text in _IMMUTABLE):
                kind = ImmutableError
            raise kind(words) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the apiserver does not answer: {error}") from None
        found: bytes = answer.data
        return found


@contextmanager
def _where_served(kind: str) -> Iterator[None]:
    """Nothing is found of an UNWATCHED kind that the cluster does not know."""
    try:
        yield
    except NotFoundError:
        if kind not in UNWATCHED:
            raise


def _path(manifest: Manifest) -> str:
    prefix, plural = _KINDS[manifest["kind"]]
    metadata = manifest["metadata"]
    return f"{prefix}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"


def _api_version(prefix: str) -> str:
    return prefix.removeprefix("/apis/").removeprefix("/api/")


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _words(error: DynamicApiError) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
