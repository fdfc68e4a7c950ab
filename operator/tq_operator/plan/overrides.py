"""The pod template of a queue, laid over the pods of its parts like a strategic merge patch of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tq_operator.plan.queue import Manifest
from transfer_queue.config.resource_pods import PodTemplate

__all__ = ["overridden"]

_EACH = "*"
_KEYS: Final = {
    "containers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists whose entries are merged, with the field that identifies an entry. Other lists are replaced."""
_USER: Final = ("runAsUser", "runAsGroup", "fsGroup")


def overridden(child: Manifest, template: PodTemplate, *, fixed_user: bool) -> Manifest:
    """Return ``child`` with ``template`` laid over its pods, if it has any.

    Args:
        child: A Deployment, a StatefulSet, or an object without pods, which is returned unchanged.
        template: Pod template of the queue.
        fixed_user: Whether pods run as the user of the images; otherwise the platform chooses the user.
    """
    pods = child.get("spec", {}).get("template")
    if pods is None:
        return child
    spec = dict(pods["spec"])
    if not fixed_user:
        context = spec["securityContext"]
        spec["securityContext"] = {key: value for key, value in context.items() if key not in _USER}
    spec = _merged(spec, template.fields)
    if spec.get("hostNetwork"):
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    own, further = pods["metadata"], template.metadata
    metadata = {
        **own,
        "labels": {**further.labels, **own["labels"]},
        "annotations": {**further.annotations, **own["annotations"]},
    }
    return {**child, "spec": {**child["spec"], "template": {**pods, "metadata": metadata, "spec": spec}}}


def _merged(own: Mapping[str, Any], further: Mapping[str, Any]) -> Manifest:
    """A value of None removes the field."""
    result = dict(own)
    for name, value in further.items():
        there = own.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(there, Mapping):
            result[name] = _merged(there, value)
        elif name in _KEYS and isinstance(value, Sequence):
            result[name] = _entries(there or [], value, name)
        else:
            result[name] = value
    return result


def _entries(own: Sequence[Manifest], further: Sequence[Manifest], name: str) -> list[Manifest]:
    result, key, containers = list(own), _KEYS[name], name in ("containers", "initContainers")
    for entry in further:
        each = containers and entry.get(key) == _EACH
        chosen = [at for at, other in enumerate(result) if each or other.get(key) == entry.get(key)]
        for at in chosen:
            result[at] = _merged(result[at], {field: value for field, value in entry.items() if field != key})
        if not chosen and not each and (not containers or "image" in entry):
            result.append(dict(entry))
    return result
