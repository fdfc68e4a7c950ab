"""The CustomResourceDefinitions of TransferQueue, TransferQueueBinding and TQNode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from tq_operator.api.binding import BINDING_KIND, BINDING_PLURAL, Binding, BindingSpec, BindingStatus
from tq_operator.api.node import NODE_KIND, NODE_PLURAL, NodeStatus
from tq_operator.api.schema import structural
from tq_operator.api.status import Status
from transfer_queue.config import defaults
from transfer_queue.config.resource import Spec, TransferQueue

__all__ = ["PLURAL", "custom_resource_definitions"]

PLURAL = "transferqueues"
_HEAD = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}

_COLUMNS = [
    ("Backend", "string", ".status.backend"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("Storage", "string", ".status.storage.summary"),
    ("Used", "string", ".status.storage.used"),
    ("Injected", "integer", ".status.injected"),
    ("Age", "date", ".metadata.creationTimestamp"),
]

_BINDING_COLUMNS = [
    ("Queue", "string", ".spec.queue.name"),
    ("Of", "string", ".spec.queue.namespace"),
    ("Bound", "string", '.status.conditions[?(@.type=="Bound")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="Bound")].reason'),
    ("Age", "date", ".metadata.creationTimestamp"),
]


_NODE_COLUMNS = [
    ("HCAs", "string", ".status.usable"),
    ("Link", "string", ".status.links"),
    ("Gb/s", "string", ".status.rates"),
    ("GPUs", "integer", ".status.gpuCount"),
    ("RDMA", "string", '.status.conditions[?(@.type=="RdmaAvailable")].status'),
    ("Reason", "string", '.status.conditions[?(@.type=="RdmaAvailable")].reason'),
    ("Unusable", "string", ".status.unusable", 1),
    ("Age", "date", ".metadata.creationTimestamp"),
]


def custom_resource_definitions() -> dict[str, dict[str, Any]]:
    """Plural -> manifest, with the schema of spec and status."""
    scale = {
        "specReplicasPath": ".spec.storage.replicas",
        "statusReplicasPath": ".status.storage.replicas",
        "labelSelectorPath": ".status.storage.selector",
    }
    queue = _schema(TransferQueue, Spec, Status)
    binding = _schema(Binding, BindingSpec, BindingStatus)
    return {
        PLURAL: _definition(defaults.KIND, PLURAL, "tq", queue, {"status": {}, "scale": scale}, _COLUMNS),
        BINDING_PLURAL: _definition(BINDING_KIND, BINDING_PLURAL, "tqb", binding, {"status": {}}, _BINDING_COLUMNS),
        NODE_PLURAL: _definition(
            NODE_KIND, NODE_PLURAL, "tqn", _node_schema(), {"status": {}}, _NODE_COLUMNS, scope="Cluster"
        ),
    }


def _node_schema() -> dict[str, Any]:
    text = "The RDMA devices and GPUs of a node, as a pod on it sees them."
    return {"type": "object", "description": text, "properties": {**_HEAD, "status": _status(NodeStatus)}}


def _status(status_model: type[BaseModel]) -> dict[str, Any]:
    status = structural(status_model)
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status["properties"]["conditions"]["items"]["properties"]["lastTransitionTime"]["format"] = "date-time"
    return status


def _schema(kind: type[BaseModel], spec: type[BaseModel], status_model: type[BaseModel]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": kind.__doc__,
        "required": ["spec"],
        "properties": {
            **_HEAD,
            "spec": structural(spec),
            "status": _status(status_model),
        },
    }


def _definition(
    kind: str,
    plural: str,
    short: str,
    schema: dict[str, Any],
    subresources: dict[str, Any],
    columns: Sequence[tuple[Any, ...]],
    scope: str = "Namespaced",
) -> dict[str, Any]:
    version = {
        "served": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
        "additionalPrinterColumns": [
            {"name": name, "type": form, "jsonPath": path, **({"priority": priority[0]} if priority else {})}
            for name, form, path, *priority in columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{defaults.GROUP}"},
        "spec": {
            "group": defaults.GROUP,
            "scope": scope,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                **({"categories": ["all"]} if scope == "Namespaced" else {}),
            },
            "versions": [
                {"name": name, "storage": name == defaults.VERSION, **version} for name in defaults.SERVED_VERSIONS
            ],
        },
    }
