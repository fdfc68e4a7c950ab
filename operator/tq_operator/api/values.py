"""The values of the chart, as types: ``values.schema.json`` is generated from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from transfer_queue.config.resource_pods import PodTemplate
from transfer_queue.config.rules import Between, Model

__all__ = ["Values"]

Port = Annotated[int, Between(1, 65535)]


class Images(Model):
    """Container images. A queue may name its own in ``spec``."""

    operator: str = Field(description="The operator.")
    server: str = Field(description="Controller and storage units of the simple backend.")
    mooncake: str = Field(description="mooncake_master and storage units of the mooncake backend.")
    etcd: str = Field(description="The etcd of queues with highAvailability.etcd.development.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(description="When to pull them.")


class Crds(Model):
    """The CustomResourceDefinitions."""

    install: bool = Field(description="Install them with the chart.")
    keep: bool = Field(description="Keep them, and with them every TransferQueue, when the chart is uninstalled.")
    conversion: Literal["None", "Webhook"] = Field(
        description="Who converts between versions of the API. None: the apiserver; Webhook: the operator."
    )


class WebhookCertificate(Model):
    """The certificate of the webhook. Without values the operator makes and renews it."""

    existing_secret: str = Field(default="", description="A Secret with tls.crt, tls.key and ca.crt.")
    issuer_ref: dict[str, str] = Field(default={}, description="An issuer of cert-manager: name, kind, group.")
    ca_bundle: str = Field(default="", description="The CA as PEM. The operator then does not write it.")


class Webhook(Model):
    """The admission webhook."""

    failure_policy: Literal["Fail", "Ignore"] = Field(
        description="Fail: a labelled pod is refused while no operator answers; Ignore: it starts without the queue."
    )
    timeout_seconds: Annotated[int, Between(1, 30)] = Field(description="How long the apiserver waits, in seconds.")
    port: Port = Field(description="Port of the webhook in the pod.")
    exclude_namespaces: list[str] = Field(description="Namespaces never looked at, besides kube-* and the chart's own.")
    certificate_days: Annotated[int, Between(1, 3650)] = Field(description="Validity of the certificates, in days.")
    certificate: WebhookCertificate = Field(default=WebhookCertificate(), description="Source of the certificate.")


class NodeReports(Model):
    """TQNodes: what RDMA devices and GPUs each node has, for ``kubectl get tqnodes``."""

    enabled: bool = Field(description="Run a pod on each node that keeps its TQNode.")
    seconds: Annotated[int, Between(1, 86400)] = Field(description="How often the node is looked at.")
    node_selector: dict[str, str] = Field(description="Labels that a node must carry.")
    tolerations: list[dict[str, JsonValue]] = Field(description="Taints that the pods tolerate.")
    resources: dict[str, JsonValue] = Field(description="Resources of each pod.")


class Monitoring(Model):
    """What Prometheus and Grafana are given."""

    alerts: bool = Field(description="Install the alert rules; needs the Prometheus operator.")
    dashboards: bool = Field(description="Install the Grafana dashboards as a ConfigMap.")
    labels: dict[str, str] = Field(description="Additional labels of rules and dashboards.")


class Queues(Model):
    """What queues have that do not say otherwise."""

    tls: Literal["operator", "off"] = Field(
        description='operator: each has certificates of a CA of its own; "off": plain TCP. See spec.security.tls.'
    )


class Values(Model):
    """The values of the chart."""

    images: Images
    image_pull_secrets: list[dict[str, str]] = Field(description="Secrets for pulling the operator's image.")
    replicas: Annotated[int, Between(1, 10)] = Field(description="Operator pods; each of them serves admission.")
    watch_namespaces: list[str] = Field(description="Namespaces to work in; empty: all.")
    resync_seconds: Annotated[int, Between(1, 86400)] = Field(description="How often every queue is looked at anyway.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(description="Verbosity of the operator.")
    resources: dict[str, JsonValue] = Field(description="Resources of the operator's container.")
    node_selector: dict[str, str] = Field(description="Labels that the operator's node must carry.")
    tolerations: list[dict[str, JsonValue]] = Field(description="Taints that the operator tolerates.")
    affinity: dict[str, JsonValue] = Field(description="Affinity of the operator's pods.")
    priority_class_name: str = Field(description="Priority class of the operator's pods; empty: none.")
    pod_annotations: dict[str, str] = Field(description="Further annotations of the operator's pods.")
    health_port: Port = Field(description="Port of probes and metrics in the operator's pods.")
    pod_template: PodTemplate = Field(description="Template that is merged over all pods of the chart.")
    openshift: bool = Field(description="The platform chooses the user of all pods, including pods of queues.")
    queues: Queues
    crds: Crds
    webhook: Webhook
    monitoring: Monitoring
    node_reports: NodeReports
    # Helm hands these two to every chart.
    global_: dict[str, JsonValue] = Field(default={}, alias="global", description="Values shared with other charts.")
