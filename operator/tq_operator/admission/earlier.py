"""What an earlier injection added to a pod that was made again from an exported manifest, and how it is taken out.

Each injection writes down in an annotation what it added beside its volumes, whose names tell: variables, the RDMA
resource, the capability to lock memory, the claim. Only what is still as it was written down is taken out: what has
changed since is the pod's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tq_operator.plan.claims import CLAIM
from tq_operator.plan.names import digest
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import GROUP

__all__ = ["ADDED_ANNOTATION", "LOCK", "Added", "drop_claim", "drop_variables", "mark", "take_resource"]

ADDED_ANNOTATION = f"{GROUP}/added"
LOCK = "IPC_LOCK"


class Added:
    """What injection added: variables, resource and capability of each container, and the template of the claim."""

    def __init__(self, text: Any = None, plain: Mapping[str, str] | None = None) -> None:
        """``text``: of the annotation. One that is none was changed by hand, and says nothing. ``plain``: marks of the
        variables of containers of which it says nothing."""
        self._plain = plain or {}
        try:
            found = json.loads(text) if isinstance(text, str) else {}
        except ValueError:
            found = {}
        found = found if isinstance(found, Mapping) else {}
        self.claim: str = str(found.get("claim") or "")
        listed = found.get("containers")
        self._containers: dict[str, dict[str, Any]] = {
            str(name): dict(entry)
            for name, entry in (listed if isinstance(listed, Mapping) else {}).items()
            if isinstance(entry, Mapping)
        }

    def variables(self, container: Manifest) -> set[str]:
        """Names of the variables of ``container`` that are as they were injected."""
        marks = self._containers.get(container.get("name", ""), {"env": self._plain}).get("env")
        marks = marks if isinstance(marks, Mapping) else {}
        return {entry["name"] for entry in container.get("env") or [] if marks.get(entry.get("name")) == mark(entry)}

    def resource(self, container: Manifest) -> str:
        return str(self._containers.get(container.get("name", ""), {}).get("resource") or "")

    def locks(self, container: Manifest) -> bool:
        return bool(self._containers.get(container.get("name", ""), {}).get("lock"))

    def note(self, container: Manifest, variables: list[Manifest], resource: str, lock: bool) -> None:
        """Write down what a container was given now."""
        entry: dict[str, Any] = {"env": {variable["name"]: mark(variable) for variable in variables}}
        if resource:
            entry["resource"] = resource
        if lock:
            entry["lock"] = True
        self._containers[container.get("name", "")] = entry

    def knows(self, container: Manifest) -> bool:
        return container.get("name", "") in self._containers

    def forget(self, container: Manifest) -> None:
        self._containers.pop(container.get("name", ""), None)

    def text(self) -> str:
        """As the annotation has it."""
        claim = {"claim": self.claim} if self.claim else {}
        return json.dumps({**claim, "containers": self._containers}, sort_keys=True)


def mark(entry: Manifest) -> str:
    """By which a variable is known again."""
    return digest(json.dumps(entry, sort_keys=True))


def drop_variables(container: Manifest, names: set[str]) -> None:
    """Take variables out of a container."""
    if names:
        container["env"] = [entry for entry in container["env"] if entry.get("name") not in names]
        _drop_empty(container, "env")


def take_resource(container: Manifest, resource: str, lock: bool) -> None:
    """Take one device of ``resource`` out of a container, and with ``lock`` the capability to lock memory."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        if resource and str((resources.get(kind) or {}).get(resource)) == "1":
            del resources[kind][resource]
            _drop_empty(resources, kind)
    _drop_empty(container, "resources")
    security = container.get("securityContext") or {}
    capabilities = security.get("capabilities") or {}
    if lock and LOCK in (capabilities.get("add") or []):
        capabilities["add"].remove(LOCK)
        _drop_empty(capabilities, "add")
        _drop_empty(security, "capabilities")
        _drop_empty(container, "securityContext")


def drop_claim(spec: Manifest, containers: list[Manifest], template: str) -> None:
    """Take the claim of ``template`` out of a pod, with its uses."""
    claims = spec.get("resourceClaims") or []
    left = [
        entry for entry in claims if (entry.get("name"), entry.get("resourceClaimTemplateName")) != (CLAIM, template)
    ]
    if len(left) == len(claims):
        return
    spec["resourceClaims"] = left
    _drop_empty(spec, "resourceClaims")
    for container in containers:
        resources = container.get("resources") or {}
        if resources.get("claims"):
            resources["claims"] = [entry for entry in resources["claims"] if entry.get("name") != CLAIM]
            _drop_empty(resources, "claims")
            _drop_empty(container, "resources")


def _drop_empty(parent: Manifest, key: str) -> None:
    if key in parent and not parent[key]:
        del parent[key]
