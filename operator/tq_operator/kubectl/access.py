"""The cluster and the queue that a command means, found as kubectl does: options, then the kubeconfig, then the pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

from tq_operator.kubectl.parts import Part
from tq_operator.plan.names import selector
from tq_operator.plan.queue import Manifest
from tq_operator.runtime.cluster import Cluster, ClusterError
from transfer_queue.cli.faults import faults
from transfer_queue.errors import ConfigError, TransferQueueError

__all__ = ["Access", "cluster_faults", "condition", "connect", "is_ready", "part_of", "pod_named"]

_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NO_DEFINITION = (
    "the cluster does not know TransferQueues; install the operator: helm install transferqueue charts/transferqueue "
    "--namespace transferqueue-system --create-namespace"
)


@dataclass(frozen=True)
class Access:
    """A cluster, with the credentials of a kubeconfig or of this pod, and the namespace that is meant."""

    configuration: client.Configuration
    namespace: str

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.api())

    def api(self) -> client.ApiClient:
        """A connection pool of its own."""
        return client.ApiClient(self.configuration)

    def queues(self) -> list[Manifest]:
        """All queues of the namespace. Raises TransferQueueError where there are no TransferQueues at all."""
        try:
            return self.cluster.queues([self.namespace])
        except NotFoundError:
            raise TransferQueueError(_NO_DEFINITION) from None

    def queue(self, name: str | None) -> Manifest:
        """The queue ``name``, by default the only one. Raises ConfigError if there are several, TransferQueueError."""
        found = self.queues()
        chosen = [item for item in found if name in (None, item["metadata"]["name"])]
        names = ", ".join(item["metadata"]["name"] for item in found) or "none"
        where = f"namespace {self.namespace}"
        if len(chosen) > 1:
            raise ConfigError(f"{where} has several TransferQueues, name one of them: {names}")
        if not chosen:
            what = f"TransferQueue {name} is not in {where}" if name else f"no TransferQueue is in {where}"
            raise TransferQueueError(f"{what}; there: {names}. kubectl get tq -A shows all, -n chooses the namespace")
        return chosen[0]

    def pods(self, queue: str, part: str | None = None) -> list[Manifest]:
        """Pods of the parts of a queue, or of one part, in the order of the parts."""
        wanted = selector(queue, part)
        found = [pod for pod in self.cluster.pods([self.namespace], queue) if _carries(pod, wanted)]
        return sorted(found, key=lambda pod: ([*Part, part_of(pod)].index(part_of(pod)), pod["metadata"]["name"]))


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Access:
    """Raises ConfigError if no kubeconfig tells of the cluster and this is no pod."""
    configuration = client.Configuration()
    configuration.retries = False  # who does not answer is told about at once, in one line
    try:
        config.load_kube_config(kubeconfig, context, configuration)  # type: ignore[no-untyped-call]
        contexts, active = config.list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == context), active)
        return Access(configuration, namespace or chosen["context"].get("namespace") or "default")
    except (config.ConfigException, yaml.YAMLError, OSError) as error:
        refusal = " ".join(str(error).split())
    if kubeconfig is None and context is None:
        try:
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            return Access(configuration, namespace or _ACCOUNT_NAMESPACE.read_text().strip())
        except (config.ConfigException, OSError):
            pass  # not in a pod: the kubeconfig is what is missing
    raise ConfigError(
        f"no usable kubeconfig: {refusal}; name one with --kubeconfig, and a context of it with --context"
    )


@contextmanager
def cluster_faults() -> Iterator[None]:
    """As :func:`transfer_queue.cli.faults.faults`, also for what the apiserver answers."""
    with faults():
        try:
            yield
        except ClusterError as error:
            raise TransferQueueError(str(error)) from None
        except (NotFoundError, ConflictError) as error:
            raise TransferQueueError(f"the apiserver refused: {error.status} {error.reason}; try again") from None


def part_of(pod: Manifest) -> str:
    return str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def condition(document: Mapping[str, Any], kind: str) -> Manifest:
    """The condition ``kind`` of a queue or pod; empty if nobody has set it."""
    found = (document.get("status") or {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether it serves and is not about to end."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def pod_named(pods: Sequence[Manifest], name: str, what: str) -> Manifest:
    """Raises ConfigError that says which there are."""
    for pod in pods:
        if pod["metadata"]["name"] == name:
            return pod
    names = ", ".join(pod["metadata"]["name"] for pod in pods) or "none"
    raise ConfigError(f"{name} is no {what} of the queue; there are: {names}")


def _carries(pod: Manifest, labels: Mapping[str, str]) -> bool:
    return all(pod["metadata"].get("labels", {}).get(name) == value for name, value in labels.items())
