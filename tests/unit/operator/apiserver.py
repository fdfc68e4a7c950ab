"""The part of an apiserver that the operator's reconciler needs, in memory: objects, lists in pages, watch events."""

from __future__ import annotations

import copy
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.plan.names import MANAGER
from tq_operator.runtime.cluster import Cluster


class MemoryCluster(Cluster):
    """Says of each request which it was, and of each change what a watch would tell."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient(client.Configuration(host="http://memory.invalid")))
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.requests: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        """(plural, event) that nobody took yet."""

    def put(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        """Make or replace what is at ``path``, as somebody else might."""
        self.version += 1
        old = self.objects.get(path)
        uid = old["metadata"]["uid"] if old else item["metadata"].get("uid", f"uid-{self.version}")
        found = copy.deepcopy(item)
        namespace, name = path.split("/namespaces/")[1].split("/")[::2]
        changing = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(self.version)}
        found["metadata"] = {**found["metadata"], **changing}
        self.objects[path] = found
        self._tell(path, "MODIFIED" if old else "ADDED", found)
        return copy.deepcopy(found)

    def drop(self, path: str, *, told: bool = True) -> None:
        """Delete; not ``told``: while the watch is interrupted."""
        self.version += 1
        found = self.objects.pop(path)
        found["metadata"]["resourceVersion"] = str(self.version)
        if told:
            self._tell(path, "DELETED", found)

    def _tell(self, path: str, kind: str, item: dict[str, Any]) -> None:
        self.events.append((path.split("/")[-2], {"type": kind, "object": copy.deepcopy(item)}))

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | list[dict[str, Any]] | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        plain = path.removesuffix("/status")
        namespaced = plain.partition("/namespaces/")[2].split("/")
        if method == "GET" and len(namespaced) < 3:
            self.requests.append(f"LIST {plain.rsplit('/', 1)[-1]}")
            return self._page(plain, dict(query or []))
        self.requests.append(f"{method} {namespaced[1]}{'/status' if plain != path else ''}")
        old = self.objects.get(plain)
        if isinstance(body, list):  # a JSON patch
            assert old is not None
            for each in body:
                *parents, name = each["path"].strip("/").split("/")
                target = old["metadata"] if parents else old
                if each["op"] == "test":
                    assert target[name] == each["value"]
                elif each["op"] == "add":
                    target[name] = each["value"]
                else:
                    del target[name]
            return self.put(plain, old)
        if method == "POST":
            return body or {}
        if method == "PATCH" and body is not None and plain == path:
            there, wanted = (old["metadata"] if old else {}), body["metadata"]
            if any(
                wanted.get(key, there.get(key)) != there.get(key)
                for key in ("uid", *(["resourceVersion"] if old else ()))
            ):
                raise ConflictError(ApiException(status=409, reason="Conflict"))  # type: ignore[no-untyped-call]
            owner = {"managedFields": [{"manager": MANAGER, "operation": "Apply"}]}
            status = old.get("status", {}) if old else {}
            return self.put(plain, {**body, "metadata": {**body["metadata"], **owner}, "status": status})
        if old is None:
            raise NotFoundError(ApiException(status=404, reason="Not Found"))  # type: ignore[no-untyped-call]
        if method == "PATCH" and body is not None:
            return self.put(plain, {**old, "status": body["status"]})
        if method == "DELETE":
            self.drop(plain)
            return {}
        return copy.deepcopy(old)

    def _page(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        plural = path.rsplit("/", 1)[-1]
        prefix = path if "/namespaces/" in path else path.removesuffix(plural)
        found = [
            copy.deepcopy(item)
            for name, item in sorted(self.objects.items())
            if name.startswith(prefix) and name.split("/")[-2] == plural and _chosen(item, query.get("labelSelector"))
        ]
        for item in found:
            item.pop("kind", None)
        began, limit = int(query.get("continue", 0)), int(query.get("limit", len(found)))
        rest = {"continue": str(began + limit)} if began + limit < len(found) else {}
        return {"items": found[began : began + limit], "metadata": {"resourceVersion": str(self.version), **rest}}


def _chosen(item: dict[str, Any], selector: str | None) -> bool:
    labels = item["metadata"].get("labels", {})
    for term in (selector or "").split(","):
        if term.startswith("!"):
            if term[1:] in labels:
                return False
            continue
        key, separator, value = term.partition("=")
        if key and (key not in labels or (separator and labels[key] != value)):
            return False
    return True
