"""What a queue with ``tls.mode: issuer`` asks of cert-manager: Certificates, whose Secrets it fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tq_operator.plan.names import QUEUE_ANNOTATION, labels
from tq_operator.plan.pods import manifest
from tq_operator.plan.queue import Manifest, Queue
from transfer_queue.config.security import namespace_name

__all__ = ["ISSUED", "client_certificate", "server_certificate", "server_hosts", "why_not_issued"]

ISSUED = "tls-issued"
"""Component of the Certificates and, since cert-manager leaves them behind, of their Secrets."""


def server_hosts(queue: Queue) -> list[str]:
    """DNS names in the certificate of controller and storage units, whoever issues it."""
    return [queue.host("controller"), queue.child("controller"), f"*.{queue.host('storage')}"]


def server_certificate(queue: Queue) -> Manifest:
    """Of controller and storage units, which are each other's clients too."""
    names = {"dnsNames": server_hosts(queue)}
    return _certificate(queue, queue.namespace, "issued-server", ["server auth", "client auth"], names)


def client_certificate(queue: Queue, namespace: str) -> Manifest:
    """Of the pods of ``namespace`` that were given the queue."""
    names = {"uris": [namespace_name(namespace)]}
    return _certificate(queue, namespace, "issued-client", ["client auth"], names)


def why_not_issued(certificate: Mapping[str, Any]) -> str:
    """What cert-manager says of a Certificate that it has not filled; empty if it has, or has not looked at it yet."""
    for condition in certificate.get("status", {}).get("conditions", []):
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            return str(condition.get("message") or condition.get("reason"))
    return ""


def _certificate(queue: Queue, namespace: str, part: str, usages: list[str], names: dict[str, list[str]]) -> Manifest:
    name = queue.client_child(part, namespace)
    found = {"labels": labels(queue.name, ISSUED), "annotations": {QUEUE_ANNOTATION: f"{queue.namespace}/{queue.name}"}}
    made = manifest(queue, "cert-manager.io/v1", "Certificate", part)
    metadata = {**made["metadata"], **found, "name": name, "namespace": namespace}
    if namespace != queue.namespace:
        del metadata["ownerReferences"]  # nothing can be owned there
    issuer = queue.spec.security.tls.issuer_ref
    assert issuer is not None
    spec = {
        "secretName": name,
        "secretTemplate": found,
        "issuerRef": issuer.model_dump(),
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", *usages],
        **names,
    }
    return {**made, "metadata": metadata, "spec": spec}
