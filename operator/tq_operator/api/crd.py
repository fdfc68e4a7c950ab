"""The CustomResourceDefinition of TransferQueue."""

from __future__ import annotations

from typing import Any

from tq_operator.api.schema import structural
from tq_operator.api.status import Status
from transfer_queue.config import defaults
from transfer_queue.config.resource import Spec, TransferQueue

__all__ = ["PLURAL", "custom_resource_definition"]

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


def custom_resource_definition() -> dict[str, Any]:
    """The manifest, with the schema of spec and status."""
    status = structural(Status)
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status["properties"]["conditions"]["items"]["properties"]["lastTransitionTime"]["format"] = "date-time"
    schema = {
        "type": "object",
        "description": TransferQueue.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(Spec),
            "status": status,
        },
    }
    version = {
        "name": defaults.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.storage.replicas",
                "statusReplicasPath": ".status.storage.replicas",
                "labelSelectorPath": ".status.storage.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": priority[0]} if priority else {})}
            for name, kind, path, *priority in _COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{defaults.GROUP}"},
        "spec": {
            "group": defaults.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": defaults.KIND,
                "listKind": f"{defaults.KIND}List",
                "plural": PLURAL,
                "singular": defaults.KIND.lower(),
                "shortNames": ["tq"],
                "categories": ["all", "transferqueue"],
            },
            "versions": [version],
        },
    }
