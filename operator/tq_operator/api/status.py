"""What the operator reports in ``status``. Counts are pods, sizes Kubernetes quantities."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from transfer_queue.config.rules import Model

__all__ = ["Condition", "Endpoints", "LastCheckpoint", "PartStatus", "Reported", "Status"]


class Reported(Model):
    """Part of a status: written by the operator, so it can be made from Python names too."""

    model_config = ConfigDict(populate_by_name=True)


class Condition(Reported):
    """One aspect of the state. Ready, Progressing and Degraded are always there.

    RdmaAvailable is there where the backend moves bytes over RDMA and the policy is not off, MasterServing where
    masters with high availability run, Restored where the spec has restoreFrom.
    """

    type: str = Field(description="Ready, Progressing, Degraded, RdmaAvailable, MasterServing or Restored.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="One word for programs.")
    message: str = Field(default="", description="What happened and what to do about it.")
    last_transition_time: str = Field(description="When status last changed.")
    observed_generation: int = Field(default=0, description="metadata.generation that this is about.")


class Endpoints(Reported):
    """Addresses of the running parts, host:port unless they are URLs."""

    controller: str | None = Field(default=None, description="Address that clients attach to, of several shards each.")
    mooncake_master: str | None = Field(
        default=None, description="Address of the mooncake_master's RPC, or the etcd that knows which master leads."
    )
    metadata_server: str | None = Field(default=None, description="URL of the metadata server.")


class PartStatus(Reported):
    """Pods of one part."""

    replicas: int = Field(default=0, description="Wanted pods.")
    ready: int = Field(default=0, description="Ready pods.")
    summary: str = Field(default="", description="ready/wanted.")


class StorageStatus(PartStatus):
    """Pods of the storage units, and what they hold."""

    selector: str = Field(default="", description="Label selector of the pods, for the scale subresource.")
    capacity: str | None = Field(default=None, description="Memory for rows over all storage units.")
    used: str | None = Field(default=None, description="Memory in use over all storage units.")


class LastCheckpoint(Reported):
    """The last complete checkpoint of spec.checkpoint."""

    time: str | None = Field(default=None, description="When it was taken.")
    rows: int | None = Field(default=None, description="Rows in it.")
    bytes: int | None = Field(default=None, description="Bytes of its files.")
    url: str | None = Field(default=None, description="Where it is.")
    error: str | None = Field(default=None, description="Why the last attempt failed; unset if it did not.")


class Status(Reported):
    """The observed state."""

    observed_generation: int = Field(default=0, description="metadata.generation that was last acted on.")
    backend: str = Field(default="", description="The backend in use.")
    conditions: list[Condition] = Field(default=[], description="Ready, Progressing, Degraded.")
    endpoints: Endpoints = Field(default=Endpoints(), description="Addresses of the running parts.")
    controller: PartStatus = Field(default=PartStatus(), description="The control plane.")
    master: PartStatus | None = Field(default=None, description="The mooncake_master.")
    leader: str | None = Field(default=None, description="Pod of the master that leads, with high availability.")
    storage: StorageStatus = Field(default=StorageStatus(), description="The storage units.")
    transport: str = Field(default="", description="How bytes move: tcp or rdma.")
    tls: str = Field(default="", description="How connections are made: off, operator, secret or issuer.")
    last_checkpoint: LastCheckpoint | None = Field(
        default=None, description="The last complete checkpoint of spec.checkpoint."
    )
    injected: int = Field(default=0, description="Pods that were given this queue.")
    operator: str | None = Field(default=None, description="The operator that keeps the queue: namespace/name.")
