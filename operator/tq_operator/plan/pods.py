"""Pieces that the pods of all parts share: hardening, probes, volumes, metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tq_operator.plan.names import QUEUE_ANNOTATION, labels, selector
from tq_operator.plan.queue import Manifest, Queue
from transfer_queue.config.resource import Part

__all__ = [
    "MIB",
    "Container",
    "headless",
    "http_probes",
    "manifest",
    "mebibytes",
    "over_nodes",
    "pod_template",
    "ready_pods",
    "service",
    "stateful_set",
]

_USER = 65532
MIB = 2**20
_READ_ONLY = {"configMap", "secret"}


@dataclass(frozen=True)
class Container:
    """A container of a part's pods."""

    image: str
    pull_policy: str
    command: list[str]
    ports: Mapping[str, int]
    probes: Manifest
    requests: Mapping[str, str]
    limits: Mapping[str, str] = field(default_factory=dict)
    env: list[Manifest] = field(default_factory=list)
    env_from: list[Manifest] = field(default_factory=list)
    volumes: Mapping[str, tuple[str, Manifest]] = field(default_factory=dict)
    """Volume name -> (mount path, volume source)."""
    before_stop: list[str] = field(default_factory=list)
    """What runs before the process is told to end."""
    stop_seconds: int = 0
    """How long all of that may take; 0: the cluster's default."""
    capabilities: tuple[str, ...] = ()
    """Makes the container run as root, with these capabilities alone: Kubernetes gives no other user any."""
    resource_claims: list[Manifest] = field(default_factory=list)
    """Entries of the pod's ``resourceClaims``, all of which the container uses."""


def manifest(queue: Queue, api_version: str, kind: str, part: str, **content: Any) -> Manifest:
    """A child of ``queue`` with its metadata."""
    metadata = {
        "name": queue.child(part),
        "namespace": queue.namespace,
        "labels": labels(queue.name, part),
        "annotations": {QUEUE_ANNOTATION: queue.name},
        "ownerReferences": [queue.owner_reference()],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def service(queue: Queue, part: str, ports: Mapping[str, int], selector: Mapping[str, str], **spec: Any) -> Manifest:
    """A Service in front of the pods of ``part``."""
    listed = [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()]
    return manifest(queue, "v1", "Service", part, spec={"selector": dict(selector), "ports": listed, **spec})


def headless(queue: Queue, name: str, ports: Mapping[str, int]) -> Manifest:
    """The Service that gives each pod of a StatefulSet a name."""
    # A unit must find its own name before it is ready.
    return service(queue, name, ports, selector(queue.name, name), clusterIP="None", publishNotReadyAddresses=True)


def stateful_set(
    queue: Queue, name: str, replicas: int, template: Manifest, claims: Sequence[Manifest] = ()
) -> Manifest:
    """Pods with names that stay. ``claims``: templates of their volumes."""
    return manifest(
        queue,
        "apps/v1",
        "StatefulSet",
        name,
        spec={
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "serviceName": queue.child(name),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": selector(queue.name, name)},
            "template": template,
            **({"volumeClaimTemplates": list(claims)} if claims else {}),
        },
    )


def over_nodes(queue: Queue, part: str) -> list[Manifest]:
    """Spread over nodes as far as they go."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(queue.name, part)},
        }
    ]


def pod_template(
    queue: Queue, name: str, part: Part, containers: Mapping[str, Container], annotations: Mapping[str, str]
) -> Manifest:
    """A pod of the part called ``name`` that the restricted Pod Security standard admits. ``containers``: by name."""
    volumes = {volume: source for each in containers.values() for volume, (_, source) in _mounts(each).items()}
    claims = [claim for each in containers.values() for claim in each.resource_claims]
    stop_seconds = max(each.stop_seconds for each in containers.values())
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            *(_container(each, container, part) for each, container in containers.items()),
            *part.extra_containers,
        ],
        # Those without a source come from the claim templates of the StatefulSet.
        "volumes": [{"name": volume, **source} for volume, source in volumes.items() if source],
    }
    if claims:
        spec["resourceClaims"] = claims
    if stop_seconds:
        spec["terminationGracePeriodSeconds"] = stop_seconds
    if part.node_selector:
        spec["nodeSelector"] = dict(part.node_selector)
    if part.tolerations:
        spec["tolerations"] = list(part.tolerations)
    if part.affinity:
        spec["affinity"] = dict(part.affinity)
    own = {QUEUE_ANNOTATION: queue.name, **annotations}
    metadata = {"labels": labels(queue.name, name), "annotations": {**part.annotations, **own}}
    return {"metadata": metadata, "spec": spec}


def _mounts(container: Container) -> dict[str, tuple[str, Manifest]]:
    return {"tmp": ("/tmp", {"emptyDir": {}}), **container.volumes}


def _container(name: str, container: Container, part: Part) -> Manifest:
    limits = {**container.limits, **part.resources.limits}
    requests = {**container.requests, **part.resources.requests}
    used = [{"name": claim["name"]} for claim in container.resource_claims]
    return {
        "name": name,
        "image": container.image,
        "imagePullPolicy": container.pull_policy,
        "command": container.command,
        "env": _environment([{"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}, *container.env], part.env),
        **({"envFrom": container.env_from} if container.env_from else {}),
        "ports": [
            {"name": port, "containerPort": number, "protocol": "TCP"} for port, number in container.ports.items()
        ],
        "resources": {
            "requests": requests,
            **({"limits": limits} if limits else {}),
            **({"claims": used} if used else {}),
        },
        "securityContext": {
            **({"runAsUser": 0, "runAsNonRoot": False} if container.capabilities else {}),
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {
                "drop": ["ALL"],
                **({"add": list(container.capabilities)} if container.capabilities else {}),
            },
        },
        # The last lines of the log become the message that the status shows.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": volume, "mountPath": path, **({"readOnly": True} if source.keys() & _READ_ONLY else {})}
            for volume, (path, source) in _mounts(container).items()
        ],
        **container.probes,
        **({"lifecycle": {"preStop": {"exec": {"command": hook}}}} if (hook := container.before_stop) else {}),
    }


def ready_pods(workload: Manifest) -> int:
    """Of a Deployment or StatefulSet: ready pods of its template as it is now, those of an older one left out."""
    status = workload.get("status", {})
    if status.get("observedGeneration", 0) < workload.get("metadata", {}).get("generation", 1):
        return 0
    updated = status.get("updatedReplicas", status.get("currentReplicas", 0))
    return int(min(status.get("readyReplicas", 0), updated))


def _environment(own: list[Manifest], further: Sequence[Manifest]) -> list[Manifest]:
    replaced = {entry.get("name") for entry in further}
    return [*(entry for entry in own if entry["name"] not in replaced), *further]


def http_probes(port: str, ready: str = "/readyz") -> Manifest:
    """Probes of a server process. A restart loses memory, so liveness is patient: a minute without an answer."""
    alive = {"path": "/healthz", "port": port}
    return {
        "startupProbe": {"httpGet": alive, "periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": {"httpGet": {"path": ready, "port": port}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def mebibytes(size: int, extra: int = 0) -> str:
    """``size + extra`` bytes as a quantity in whole Mi, rounded up."""
    return f"{-(-(size + extra) // MIB)}Mi"
