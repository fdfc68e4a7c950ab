"""What the plan is made from: one queue, and the images that the operator was installed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tq_operator.plan.names import child_name, digest
from tq_operator.plan.rdma import Transport, choose_transport
from transfer_queue.config import defaults, resource
from transfer_queue.config.resource import HighAvailability, Spec, TransferQueue

__all__ = ["Images", "Manifest", "Queue", "queue_from"]

Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True)
class Images:
    """Images used where a queue names none."""

    server: str
    mooncake: str
    pull_policy: str = "IfNotPresent"
    etcd: str = defaults.ETCD_IMAGE


@dataclass(frozen=True)
class Queue:
    """A valid TransferQueue as the apiserver holds it."""

    resource: TransferQueue
    uid: str
    generation: int
    decided: Transport | None = None
    """How the bytes move, once nodes were looked at; None: as the spec says."""

    @property
    def name(self) -> str:
        return self.resource.metadata.name

    @property
    def namespace(self) -> str:
        return self.resource.metadata.namespace

    @property
    def spec(self) -> Spec:
        return self.resource.spec

    @property
    def annotations(self) -> dict[str, str]:
        return self.resource.metadata.annotations

    @property
    def high_availability(self) -> HighAvailability | None:
        """Set if several masters take over from each other."""
        return self.spec.backend.mooncake.high_availability if self.spec.backend.mooncake else None

    @property
    def etcd_members(self) -> list[str]:
        """host:port of the etcd of the masters."""
        group = self.high_availability
        if group is None:
            return []
        development = group.etcd.development
        return [f"{self.host('etcd')}:{development.port}"] if development else list(group.etcd.endpoints)

    @property
    def cluster_id(self) -> str:
        """Of the masters' state in etcd; a later queue of the same name has another."""
        return f"{self.namespace}.{self.name}.{digest(self.uid)}"

    @property
    def transport(self) -> Literal["tcp", "rdma"]:
        return self.decided.protocol if self.decided else self.spec.transport

    def child(self, part: str) -> str:
        """Name of the child for ``part``: controller, storage, mooncake-master, mooncake-masters, etcd or config."""
        return child_name(self.name, part)

    def host(self, part: str) -> str:
        """DNS name of the Service of ``part``, good in every namespace."""
        return f"{self.child(part)}.{self.namespace}.svc"

    @cached_property
    def controller_address(self) -> str:
        return f"{self.host('controller')}:{self.spec.controller.port}"

    def owner_reference(self) -> Manifest:
        """The reference by which Kubernetes deletes children after their queue."""
        return {
            "apiVersion": defaults.API_VERSION,
            "kind": defaults.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def queue_from(document: Mapping[str, Any]) -> Queue:
    """The queue as the apiserver or a user wrote it. Raises ConfigError if it is not valid."""
    found = resource.parse(document)
    metadata = document["metadata"]
    uid, generation = str(metadata.get("uid", "")), metadata.get("generation", 0)
    transport = (document.get("status") or {}).get("transport")
    # Pods get what the queue runs with.
    decided = Transport(transport) if transport in ("tcp", "rdma") else choose_transport(found.spec, None, None, False)
    return Queue(found, uid, generation, decided)
