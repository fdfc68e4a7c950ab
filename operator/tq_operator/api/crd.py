"""The CustomResourceDefinitions of TransferQueue and TransferQueueBinding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from tq_operator.api.binding import BINDING_KIND, BINDING_PLURAL, Binding, BindingSpec, BindingStatus
from tq_operator.api.schema import structural
from tq_operator.api.status import Status
from transfer_queue.config import defaults
from transfer_queue.config.resource import Spec, TransferQueue

__all__ = ["PLURAL", "custom_resource_definitions"]

PLURAL = "transferqueues"

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
    }


def _schema(kind: type[BaseModel], spec: type[BaseModel], status_model: type[BaseModel]) -> dict[str, Any]:
    status = structural(status_model)
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status["properties"]["conditions"]["items"]["properties"]["lastTransitionTime"]["format"] = "date-time"
    return {
        "type": "object",
        "description": kind.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(spec),
            "status": status,
        },
    }


def _definition(
    kind: str,
    plural: str,
    short: str,
    schema: dict[str, Any],
    subresources: dict[str, Any],
    columns: Sequence[tuple[Any, ...]],
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
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["all"],
            },
            "versions": [
                {"name": name, "storage": name == defaults.VERSION, **version} for name in defaults.SERVED_VERSIONS
            ],
        },
    }
