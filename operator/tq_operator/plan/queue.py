"""What the plan is made from: one queue, and the images that the operator was installed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tq_operator.plan.names import child_name, digest
from tq_operator.plan.rdma import Transport, choose_transport
from transfer_queue.config import defaults, resource
from transfer_queue.config.resource import HighAvailability, Spec, TlsMode, TransferQueue

__all__ = ["RESTORED", "Images", "Manifest", "Queue", "queue_from", "running_tls"]

RESTORED = "Restored"
"""Type of the condition with the result of restoreFrom; Unknown before there is one."""
Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True)
class Images:
    """Settings of the installation: the default images of queues, and the user of their pods."""

    server: str
    mooncake: str
    pull_policy: str = "IfNotPresent"
    etcd: str = defaults.ETCD_IMAGE
    fixed_user: bool = True
    """Whether pods run as the user of the images; otherwise the platform chooses a user for their namespace."""
    ipv6: bool = False
    """Whether Services, and therefore pods, have IPv6 addresses first."""


@dataclass(frozen=True)
class Queue:
    """A valid TransferQueue as the apiserver holds it."""

    resource: TransferQueue
    uid: str
    generation: int
    decided: Transport | None = None
    """How the bytes move, once nodes were looked at; None: as the spec says."""
    tls: TlsMode = "off"
    """What the servers shall use."""
    running_tls: TlsMode = "off"
    """What the servers that there are use, and with them new pods."""
    etcd_data: str = ""
    """UID of the pod in whose volume the operator's etcd keeps the log of the masters; empty if unknown."""
    restored: bool = False
    """Whether the restore is over, loaded or not: it happens once in the life of a queue."""

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

    @property
    def restores(self) -> bool:
        """Whether the queue is still to be loaded with what restoreFrom names."""
        return self.spec.restore_from is not None and not self.restored

    @property
    def shards(self) -> int:
        """Controllers that share the partitions."""
        return self.spec.controller.shards

    @cached_property
    def controller_addresses(self) -> list[str]:
        """host:port of each controller."""
        host, first = self.host("controller"), self.spec.controller.port
        return [f"{host}:{first + shard}" for shard in range(self.shards)]

    @property
    def metrics_ports(self) -> list[int]:
        """Of each controller."""
        first = self.spec.controller.metrics_port
        return [first + shard for shard in range(self.shards)]

    def admits(self, namespace: str) -> bool:
        """Whether pods of ``namespace`` may use the queue."""
        return namespace == self.namespace or bool({"*", namespace} & set(self.spec.access.namespaces))

    def client_secret(self, namespace: str) -> str:
        """Name of the Secret with the certificate of the pods of ``namespace`` that use the queue."""
        if own := self.spec.security.tls.client_secret:
            return own
        return self.client_child("issued-client" if self.running_tls == "issuer" else "tls-client", namespace)

    def client_child(self, part: str, namespace: str) -> str:
        """Name of the object for ``part`` in a namespace of clients."""
        if namespace == self.namespace:
            return self.child(part)
        return self.child(f"{digest(self.namespace)}-{part}")  # there may be a queue of the same name there

    @property
    def server_secret(self) -> str:
        """Name of the Secret with the certificate of controller and storage units."""
        made = self.child("issued-server" if self.tls == "issuer" else "tls-server")
        return self.spec.security.tls.server_secret or made

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


def queue_from(document: Mapping[str, Any], default_tls: TlsMode = "off") -> Queue:
    """The queue as the apiserver or a user wrote it. ``default_tls``: of queues that say nothing of TLS.

    Raises ConfigError if it is not valid.
    """
    found = resource.parse(document)
    metadata = document["metadata"]
    uid, generation = str(metadata.get("uid", "")), metadata.get("generation", 0)
    status = document.get("status") or {}
    transport = status.get("transport")
    # Pods get what the queue runs with.
    decided = Transport(transport) if transport in ("tcp", "rdma") else choose_transport(found.spec, None, None, False)
    tls = found.spec.tls_mode(default_tls)
    restored = any(
        entry.get("type") == RESTORED and entry.get("status") != "Unknown" for entry in status.get("conditions", [])
    )
    return Queue(found, uid, generation, decided, tls, running_tls(status) or tls, restored=restored)


def running_tls(status: Mapping[str, Any]) -> TlsMode | None:
    """What the servers of a queue with this status use; None if there are none yet."""
    told: TlsMode | None = status.get("tls")
    return told or ("off" if status.get("transport") else None)  # an operator that knew no TLS wrote it
