"""What a labelled pod gets so that ``import transfer_queue`` finds its queue. Pure functions over pod JSON.

The settings travel in an annotation that the kubelet shows to the container as a file. So a pod in any namespace gets
them, and no ConfigMap has to be copied there or to exist before the pod starts.

Injecting an injected pod changes nothing, even if other webhooks changed it in between. A pod that is created from an
exported manifest gets the settings of the queue that it names now, and loses the additions of an earlier injection.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tq_operator.admission.earlier import (
    ADDED_ANNOTATION,
    LOCK,
    Added,
    drop_claim,
    drop_variables,
    mark,
    take_resource,
)
from tq_operator.plan.claims import CLAIM, client_claim
from tq_operator.plan.names import INJECT_LABEL, INJECTED_ANNOTATION, QUEUE_LABEL, label_value
from tq_operator.plan.queue import Manifest, Queue
from tq_operator.plan.settings import (
    CONFIG_DIRECTORY,
    TLS_DIRECTORY,
    TOKEN_DIRECTORY,
    TOKEN_KEY,
    attach_settings,
    yaml_text,
)
from transfer_queue.config.defaults import GROUP

__all__ = [
    "KEEP_ENV_ANNOTATION",
    "SETTINGS_ANNOTATION",
    "TOKEN_ANNOTATION",
    "inject",
    "malformed",
    "patch",
    "refused",
    "wanted_queue",
]

SETTINGS_ANNOTATION = f"{GROUP}/attach"
KEEP_ENV_ANNOTATION = f"{GROUP}/keep-env"
"""On pods: variables, comma-separated, that are never injected because envFrom sets them."""
TOKEN_ANNOTATION = f"{GROUP}/token-secret"
"""On pods: the Secret of their namespace whose key token they show instead of a certificate."""
_CONFIG_FILE = "attach.yaml"
_CONFIG_VOLUME = "transferqueue-config"
_SHM_VOLUME = "transferqueue-shm"
_TLS_VOLUME = "transferqueue-tls"
_TOKEN_VOLUME = "transferqueue-token"
_LONGEST_LABEL = 63
_NAMES_QUEUE = {"TQ_CONFIG_FILE", "TQ_CONTROLLER_ADDRESS"}
_POD_IP: Manifest = {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}
_PLAIN: list[Manifest] = [
    {"name": "LOCAL_IP", "valueFrom": _POD_IP},
    {"name": "MC_TCP_BIND_ADDRESS", "valueFrom": _POD_IP},
    {"name": "MC_STORE_MEMCPY", "value": "0"},
    {"name": "TQ_LOGGING_LEVEL", "value": "WARNING"},
]
"""Variables of every queue."""
_CHANGED = (("metadata", "annotations"), ("metadata", "labels"), ("spec", "resourceClaims"), ("spec", "volumes"))


_CONTAINER: Any = {
    "name": str,
    "env": [{"name": str}],
    "volumeMounts": [{"name": str, "mountPath": str}],
    "resources": {"limits": {}, "requests": {}, "claims": [{"name": str}]},
    "securityContext": {"capabilities": {"add": [str]}},
}
_POD: Any = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        "containers": [_CONTAINER],
        "initContainers": [_CONTAINER],
        "volumes": [{"name": str}],
        "resourceClaims": [{"name": str, "resourceClaimTemplateName": str}],
    },
}
"""What is looked at here: objects and their fields, lists and their entries, and texts."""


def malformed(pod: Any) -> str:
    """Why ``pod`` is none, as far as is looked at here; empty if it is one. Any field may be missing or null."""
    problem = _misfit(pod, _POD, "")
    return problem and f"not a pod: {problem}"


def _misfit(value: Any, shape: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            return f"{where or 'it'} must be an object"
        found = (_misfit(value.get(name), inner, f"{where}.{name}".lstrip(".")) for name, inner in shape.items())
        return next(filter(None, found), "")
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} must be a list"
        (inner,) = shape
        if any(entry is None for entry in value):
            return f"{where} must have no empty entries"
        return next(filter(None, (_misfit(entry, inner, f"{where}[]") for entry in value)), "")
    return "" if isinstance(value, shape) else f"{where} must be a string"


def wanted_queue(pod: Mapping[str, Any], namespace: str) -> tuple[str, str] | None:
    """(namespace, name) of the queue that a pod's label or annotation asks for; None if it asks for none.

    NAME is a queue of the pod's own namespace. A label cannot hold a "/", so there another namespace's queue is
    NAMESPACE_NAME (no name in Kubernetes has a "_"); as an annotation NAMESPACE/NAME. Raises ValueError for other text,
    and where label and annotation name different queues, unless the name is too long for a label.
    """
    metadata = pod.get("metadata") or {}
    asked = [(metadata.get(kind) or {}).get(INJECT_LABEL) for kind in ("annotations", "labels")]
    named = [_queue_name(str(text)) for text in asked if text]
    if not named:
        return None
    first, last = named[0], named[-1]
    short = len("_".join(filter(None, first))) <= _LONGEST_LABEL
    if short and (last[1] != first[1] or last[0] not in ("", first[0] or namespace)):
        raise ValueError(
            f'the label {INJECT_LABEL} says "{asked[1]}" and the annotation of that name "{asked[0]}"; remove one'
        )
    return first[0] or namespace, first[1]


def _queue_name(asked: str) -> tuple[str, str]:
    parts = re.split("[/_]", asked)
    if len(parts) > 2 or not all(parts):
        raise ValueError(f'{INJECT_LABEL}: "{asked}" is neither NAME nor NAMESPACE_NAME of a TransferQueue')
    return ("", parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def refused(pod: Mapping[str, Any], queue: Queue, namespace: str) -> str:
    """Why ``queue`` cannot be injected into a pod of ``namespace``, with what to do; empty if it can."""
    return refused_claim(pod, queue, namespace) or _taken_volume(pod) or _hidden_path(pod, queue, namespace)


def _taken_volume(pod: Mapping[str, Any]) -> str:
    """A volume of the pod's own that is called like one of ours; that of an earlier injection is ours."""
    if INJECTED_ANNOTATION in ((pod.get("metadata") or {}).get("annotations") or {}):
        return ""
    names = {_CONFIG_VOLUME, _SHM_VOLUME, _TLS_VOLUME, _TOKEN_VOLUME}
    taken = [str(volume["name"]) for volume in _listed(pod.get("spec"), "volumes") if volume.get("name") in names]
    return (taken and f"spec.volumes: {taken[0]} is the name of a volume that is injected; rename yours") or ""


def _hidden_path(pod: Mapping[str, Any], queue: Queue, namespace: str) -> str:
    """A mount of the pod's own where ours is to be, unless the container names its queue itself."""
    token = ((pod.get("metadata") or {}).get("annotations") or {}).get(TOKEN_ANNOTATION)
    places = {path: name for name, (path, _) in _secrets(queue, namespace, token).items()}
    for container in _chosen_containers(pod.get("spec") or {}, queue):
        names = {entry.get("name") for entry in _listed(container, "env")}
        own = bool(names & _NAMES_QUEUE) and _CONFIG_VOLUME not in {
            mount.get("name") for mount in _listed(container, "volumeMounts")
        }
        for mount in _listed(container, "volumeMounts"):
            path = str(mount.get("mountPath", "")).rstrip("/")
            for place, volume in {**places, **({} if own else {CONFIG_DIRECTORY: _CONFIG_VOLUME})}.items():
                if f"{path}/".startswith(f"{place}/") and mount.get("name") != volume:
                    return (
                        f"container {container.get('name')}: volume {mount.get('name')} is mounted at {path}, where "
                        f"TransferQueue {queue.namespace}/{queue.name} injects its settings; mount it elsewhere, or "
                        "name the container in spec.injection.excludeContainers of the queue"
                    )
    return ""


def refused_claim(pod: Mapping[str, Any], queue: Queue, namespace: str) -> str:
    """Why a pod of ``namespace`` cannot have the RDMA devices of ``queue``; empty if it can, or brings its own."""
    if namespace == queue.namespace or client_claim(queue) is None or _claim_called_so(pod.get("spec") or {}):
        return ""
    return (
        f"TransferQueue {queue.namespace}/{queue.name} gives RDMA devices by resource claims, whose templates pods of "
        f"namespace {namespace} cannot use; make a ResourceClaimTemplate in {namespace} and give the pod a resource "
        f"claim {CLAIM} of it, or have the queue use rdma.resourceName"
    )


def inject(pod: Mapping[str, Any], queue: Queue, namespace: str | None = None) -> Manifest:
    """A copy of ``pod`` that finds ``queue``. Everything the pod says itself stays.

    ``namespace`` of the pod, unless it is the queue's.
    """
    result = copy.deepcopy(dict(pod))
    metadata, spec = _ensure(result, "metadata", {}), _ensure(result, "spec", {})
    annotations = _ensure(metadata, "annotations", {})
    again = INJECTED_ANNOTATION in annotations
    # Older operators wrote nothing down.
    plain = {entry["name"]: mark(entry) for entry in _PLAIN} if again and ADDED_ANNOTATION not in annotations else {}
    added = Added(annotations.get(ADDED_ANNOTATION) if again else None, plain)
    annotations[INJECTED_ANNOTATION] = f"{queue.namespace}/{queue.name}"
    secrets = _secrets(queue, namespace or queue.namespace, annotations.get(TOKEN_ANNOTATION))
    settings = attach_settings(queue, queue.running_tls, token=_TOKEN_VOLUME in secrets)
    annotations[SETTINGS_ANNOTATION] = yaml_text(settings)
    if again:
        _drop_volumes(spec, {_TLS_VOLUME, _TOKEN_VOLUME} - secrets.keys())
    _ensure(metadata, "labels", {})[QUEUE_LABEL] = label_value(queue.name)

    # Names from envFrom cannot be seen here, and what is injected goes before them: such names are listed.
    kept = {name.strip() for name in str(annotations.get(KEEP_ENV_ANNOTATION, "")).split(",")}
    chosen = list(_chosen_containers(spec, queue))
    for container in _containers(spec):
        if not any(container is each for each in chosen):
            _leave_container(container, added)
    mounted, claimed = False, _add_claim(spec, queue, added)
    for container in chosen:
        mounted |= _inject_container(container, queue, kept, secrets, added)
        if claimed:
            _add(_ensure(_ensure(container, "resources", {}), "claims", []), {"name": CLAIM})
    annotations[ADDED_ANNOTATION] = added.text()
    shm = {"medium": "Memory", "sizeLimit": str(queue.spec.injection.shared_memory)}
    wanted = [_config_volume(), *({"name": name, "secret": secret} for name, (_, secret) in secrets.items())]
    volumes = _ensure(spec, "volumes", [])
    for volume in [*wanted, *([{"name": _SHM_VOLUME, "emptyDir": shm}] if mounted else [])]:
        _add(volumes, volume, replace=again)
    return result


def patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """JSON patch from ``before`` to ``after`` = inject(before): whole containers and volumes, not single fields."""
    operations: list[dict[str, Any]] = []
    for parent, key in _CHANGED:
        if before.get(parent) is None:
            operations.append({"op": "add", "path": f"/{parent}", "value": after[parent]})
        elif key not in after[parent]:
            if key in before[parent]:
                operations.append({"op": "remove", "path": f"/{parent}/{key}"})
        elif before[parent].get(key) != after[parent][key]:
            operations.append({"op": "add", "path": f"/{parent}/{key}", "value": after[parent][key]})
    for key in ("initContainers", "containers"):
        pairs = zip(_listed(before.get("spec"), key), _listed(after.get("spec"), key), strict=True)
        for position, (old, new) in enumerate(pairs):
            if old != new:
                operations.append({"op": "replace", "path": f"/spec/{key}/{position}", "value": new})
    return operations


def _claim_called_so(spec: Mapping[str, Any]) -> Manifest | None:
    return next((entry for entry in _listed(spec, "resourceClaims") if entry.get("name") == CLAIM), None)


def _add_claim(spec: Manifest, queue: Queue, added: Added) -> bool:
    """Whether the pod has the queue's claim for its containers; a claim of its own is its own affair."""
    wanted = client_claim(queue)
    template = wanted["resourceClaimTemplateName"] if wanted else ""
    if added.claim and added.claim != template:
        drop_claim(spec, _containers(spec), added.claim)
        added.claim = ""
    if wanted is None:
        return False
    if (found := _claim_called_so(spec)) is None:
        templates = [entry.get("resourceClaimTemplateName") for entry in _listed(spec, "resourceClaims")]
        if template in templates:
            return False
        _ensure(spec, "resourceClaims", []).append(wanted)
        added.claim = template
        return True
    return bool(found.get("resourceClaimTemplateName") == template)


def _containers(spec: Mapping[str, Any]) -> list[Manifest]:
    return [*_listed(spec, "initContainers"), *_listed(spec, "containers")]


def _chosen_containers(spec: Mapping[str, Any], queue: Queue) -> Iterable[Manifest]:
    injection = queue.spec.injection
    # Native sidecars are init containers.
    keys = ("initContainers", "containers") if injection.init_containers else ("containers",)
    for key in keys:
        for container in _listed(spec, key):
            if container.get("name") not in injection.exclude_containers:
                yield container


def _secrets(queue: Queue, namespace: str, token: str | None) -> dict[str, tuple[str, Manifest]]:
    """Volume name -> (mount path, Secret)."""
    found: dict[str, tuple[str, Manifest]] = {}
    if queue.running_tls != "off":
        found[_TLS_VOLUME] = (TLS_DIRECTORY, {"secretName": queue.client_secret(namespace)})
    if token:
        items = [{"key": TOKEN_KEY, "path": TOKEN_KEY}]
        found[_TOKEN_VOLUME] = (TOKEN_DIRECTORY, {"secretName": str(token), "items": items})
    return found


def _inject_container(
    container: Manifest, queue: Queue, kept: set[str], secrets: Mapping[str, tuple[str, Manifest]], added: Added
) -> bool:
    """Whether /dev/shm was mounted."""
    earlier = added.variables(container)
    own = {entry.get("name") for entry in container.get("env") or []} - earlier | kept
    wanted = [entry for entry in _environment(queue, own) if entry["name"] not in own]
    found = [entry for entry in container.get("env") or [] if entry.get("name") in earlier]
    if found != wanted:  # in front, so that the container's own entries can refer to them as $(NAME)
        drop_variables(container, earlier)
        container["env"] = [*wanted, *(container.get("env") or [])]
    mounts = _ensure(container, "volumeMounts", [])
    paths = {str(mount.get("mountPath", "")).rstrip("/"): mount for mount in mounts}
    if CONFIG_DIRECTORY not in paths:
        mounts.append({"name": _CONFIG_VOLUME, "mountPath": CONFIG_DIRECTORY, "readOnly": True})
    for volume, (path, _) in secrets.items():
        if path not in paths:
            mounts.append({"name": volume, "mountPath": path, "readOnly": True})
    if "/dev/shm" not in paths:
        mounts.append({"name": _SHM_VOLUME, "mountPath": "/dev/shm"})
    added.note(container, wanted, *_give_rdma(container, queue, added))
    return "/dev/shm" not in paths or paths["/dev/shm"].get("name") == _SHM_VOLUME


def _leave_container(container: Manifest, added: Added) -> None:
    """Take out what an earlier injection added to a container that the queue leaves out."""
    if not added.knows(container):
        return
    drop_variables(container, added.variables(container))
    take_resource(container, added.resource(container), added.locks(container))
    if mounts := container.get("volumeMounts"):
        ours = {_CONFIG_VOLUME, _SHM_VOLUME, _TLS_VOLUME, _TOKEN_VOLUME}
        container["volumeMounts"] = [mount for mount in mounts if mount.get("name") not in ours]
    added.forget(container)


def _environment(queue: Queue, own: set[Any]) -> list[Manifest]:
    entries = [*_PLAIN]
    if not own & _NAMES_QUEUE:  # a pod that names its queue itself means it
        entries.append({"name": "TQ_CONFIG_FILE", "value": f"{CONFIG_DIRECTORY}/{_CONFIG_FILE}"})
    if queue.transport == "rdma":
        entries.append({"name": "MC_ENABLE_DEST_DEVICE_AFFINITY", "value": "1"})
    named = {entry["name"] for entry in entries}
    further = [{"name": name, "value": value} for name, value in sorted(queue.spec.injection.env.items())]
    return [*entries, *(entry for entry in further if entry["name"] not in named)]


def _give_rdma(container: Manifest, queue: Queue, added: Added) -> tuple[str, bool]:
    """Give a container the devices of the queue; where they come with a claim, no resource. Returns the resource and
    whether to lock memory, as far as they were added."""
    rdma = queue.spec.rdma
    wanted = queue.transport == "rdma" and bool(rdma.resource_name or rdma.claim)
    resource = (wanted and rdma.resource_name) or ""
    had, locks = added.resource(container), added.locks(container)
    take_resource(container, had if had != resource else "", locks and not wanted)
    gives = resource if had == resource else ""
    if not wanted:
        return "", False
    resources = _ensure(container, "resources", {})
    if resource and resource not in (resources.get("limits") or {}):
        _ensure(resources, "limits", {})[resource] = "1"
        _ensure(resources, "requests", {})[resource] = "1"
        gives = resource
    capabilities = _ensure(_ensure(container, "securityContext", {}), "capabilities", {})
    names = _ensure(capabilities, "add", [])
    if LOCK not in names:  # registered memory is locked memory
        names.append(LOCK)
        locks = True
    return gives, locks


def _config_volume() -> Manifest:
    field = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{SETTINGS_ANNOTATION}']"}
    return {"name": _CONFIG_VOLUME, "downwardAPI": {"items": [{"path": _CONFIG_FILE, "fieldRef": field}]}}


def _drop_volumes(spec: Manifest, names: set[str]) -> None:
    """Remove volumes of an earlier injection, with their mounts."""
    if spec.get("volumes"):
        spec["volumes"] = [volume for volume in spec["volumes"] if volume.get("name") not in names]
    for container in (*_listed(spec, "initContainers"), *_listed(spec, "containers")):
        if mounts := container.get("volumeMounts"):
            container["volumeMounts"] = [mount for mount in mounts if mount.get("name") not in names]


def _add(entries: list[Manifest], entry: Manifest, *, replace: bool = False) -> None:
    """Add an entry unless one of its name exists; with ``replace`` the new entry replaces it."""
    for position, other in enumerate(entries):
        if other.get("name") == entry["name"]:
            if replace:
                entries[position] = entry
            return
    entries.append(entry)


def _ensure(parent: Manifest, key: str, empty: Any) -> Any:
    if parent.get(key) is None:
        parent[key] = empty
    return parent[key]


def _listed(parent: Mapping[str, Any] | None, key: str) -> list[Manifest]:
    found: list[Manifest] = (parent or {}).get(key) or []
    return found
