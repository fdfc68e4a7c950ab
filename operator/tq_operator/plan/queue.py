"""What the plan is made from: one queue, and the images that the operator was installed with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tq_operator.plan.names import child_name
from transfer_queue.config import defaults
from transfer_queue.config.resource import Spec, TransferQueue

__all__ = ["Images", "Manifest", "Queue"]

Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True)
class Images:
    """Images used where a queue names none."""

    server: str
    mooncake: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Queue:
    """A valid TransferQueue as the apiserver holds it."""

    resource: TransferQueue
    uid: str
    generation: int

    @property
    def name(self) -> str:
        return self.resource.metadata.name

    @property
    def namespace(self) -> str:
        return self.resource.metadata.namespace

    @property
    def spec(self) -> Spec:
        return self.resource.spec

    def child(self, part: str) -> str:
        """Name of the child for ``part``: controller, storage, mooncake-master or config."""
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
