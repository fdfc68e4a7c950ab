"""Settings of pods in a resource: those of one part, and the template that the operator lays over all pods."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from transfer_queue.config.quantity import Amount
from transfer_queue.config.rules import Model

__all__ = ["Part", "PodMetadata", "PodSpec", "PodTemplate", "Resources"]

Object = dict[str, JsonValue]


class Resources(Model):
    """Resources that each pod requests."""

    requests: dict[str, Amount] = Field(default={}, description="Guaranteed amounts, such as cpu: 500m, memory: 2Gi.")
    limits: dict[str, Amount] = Field(default={}, description="Upper bounds.")


class Part(Model):
    """Settings of the pods of one part; ``tq up`` ignores them."""

    image: str | None = Field(
        default=None, description="Container image; by default the one the operator was installed with."
    )
    resources: Resources = Field(default=Resources(), description="Resource requests and limits of the container.")
    node_selector: dict[str, str] = Field(default={}, description="Labels that a node must carry.")
    tolerations: list[dict[str, JsonValue]] = Field(default=[], description="Taints of nodes that the pods tolerate.")
    affinity: dict[str, JsonValue] = Field(default={}, description="Affinity of the pods, as in a pod.")
    annotations: dict[str, str] = Field(default={}, description="Further annotations of the pods.")
    env: list[dict[str, JsonValue]] = Field(
        default=[], description="Further environment variables; one of the same name replaces the operator's."
    )
    extra_containers: list[dict[str, JsonValue]] = Field(
        default=[], description="Further containers beside the part's own, as in a pod."
    )


class PodMetadata(Model):
    """Labels and annotations. They do not replace those of the operator."""

    labels: dict[str, str] = Field(default={}, description="Additional labels, such as a queue name of Kueue.")
    annotations: dict[str, str] = Field(default={}, description="Additional annotations.")


class PodSpec(Model):
    """Fields of a pod, as in Kubernetes. Objects are merged, lists of named entries by their names; others replace."""

    security_context: Object | None = Field(default=None, description="Security context of the pods.")
    image_pull_secrets: list[dict[str, str]] | None = Field(default=None, description="Secrets for pulling images.")
    priority_class_name: str | None = Field(default=None, description="Priority class; unset: the cluster's default.")
    preemption_policy: Literal["Never", "PreemptLowerPriority"] | None = Field(
        default=None, description="Whether the pods preempt others."
    )
    runtime_class_name: str | None = Field(default=None, description="RuntimeClass of the pods.")
    scheduler_name: str | None = Field(default=None, description="Scheduler of the pods.")
    scheduling_gates: list[dict[str, str]] | None = Field(default=None, description="Gates before scheduling.")
    service_account_name: str | None = Field(default=None, description="ServiceAccount of the pods.")
    automount_service_account_token: bool | None = Field(default=None, description="Mount its token; by default false.")
    host_network: bool | None = Field(default=None, description="Use the network of the node.")
    host_users: bool | None = Field(default=None, description="false: a user namespace for each pod.")
    host_aliases: list[Object] | None = Field(default=None, description="Entries of /etc/hosts, by ip.")
    share_process_namespace: bool | None = Field(default=None, description="One process namespace for a pod.")
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] | None = Field(
        default=None, description="DNS policy; by default ClusterFirstWithHostNet with hostNetwork."
    )
    dns_config: Object | None = Field(default=None, description="DNS settings that extend or replace the policy's.")
    node_selector: dict[str, str] | None = Field(default=None, description="Labels that a node must carry.")
    tolerations: list[Object] | None = Field(default=None, description="Taints of nodes that the pods tolerate.")
    affinity: Object | None = Field(default=None, description="Affinity of the pods.")
    topology_spread_constraints: list[Object] | None = Field(default=None, description="Spread, by topologyKey.")
    termination_grace_period_seconds: int | None = Field(default=None, description="Time to end, in seconds.")
    containers: list[Object] | None = Field(
        default=None,
        description='Fields of containers, by name; the name "*" means all containers. An entry with another name is '
        "added if it has an image, and ignored otherwise.",
    )
    init_containers: list[Object] | None = Field(default=None, description="Init containers, by name.")
    volumes: list[Object] | None = Field(default=None, description="Volumes, by name.")


class PodTemplate(Model):
    """A template that is laid over every pod of the queue. ``tq up`` ignores it."""

    metadata: PodMetadata = Field(default=PodMetadata(), description="Labels and annotations.")
    spec: PodSpec = Field(default=PodSpec(), description="Fields of the pods.")

    @property
    def fields(self) -> Object:
        """The fields of the pods' spec that are set, as in YAML."""
        return self.spec.model_dump(mode="json", by_alias=True, exclude_none=False, exclude_unset=True)
