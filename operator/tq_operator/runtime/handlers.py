"""What kopf watches: events only ask for another look at a queue. Nothing is stored on the objects, no finalizers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import kopf

from tq_operator.api.crd import PLURAL
from tq_operator.plan.names import INJECTED_ANNOTATION, MANAGER, QUEUE_ANNOTATION, QUEUE_LABEL
from tq_operator.runtime.reconciler import Reconciler
from transfer_queue.config.defaults import GROUP, VERSION

__all__ = ["kopf_settings", "watch"]

_CHILDREN = (
    ("apps", "v1", "deployments"),
    ("apps", "v1", "statefulsets"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
)
_PODS = ("", "v1", "pods")
_OURS = {QUEUE_LABEL: kopf.PRESENT}


def watch(registry: kopf.OperatorRegistry, reconciler: Reconciler) -> None:
    """Ask ``reconciler`` for a queue whenever it, a child, or a pod that uses it changes."""

    # Coroutines: kopf runs plain functions on threads, and the reconciler belongs to the loop.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def queue_changed(namespace: str | None, name: str, event: Mapping[str, Any], **_: Any) -> None:
        key = (namespace or "", name)
        if event.get("type") == "DELETED":
            reconciler.documents.pop(key, None)
        else:
            reconciler.documents[key] = copy.deepcopy(dict(event["object"]))
        reconciler.request(key)

    async def child_changed(namespace: str | None, annotations: Mapping[str, str], **_: Any) -> None:
        if name := annotations.get(QUEUE_ANNOTATION):
            reconciler.request((namespace or "", name))

    for group, version, plural in _CHILDREN:
        kopf.on.event(group, version, plural, registry=registry, id=f"{plural}-changed", labels=_OURS)(child_changed)

    @kopf.on.event(*_PODS, registry=registry, labels=_OURS)
    async def pod_changed(namespace: str | None, annotations: Mapping[str, str], **_: Any) -> None:
        await child_changed(namespace, annotations)
        owner, separator, name = annotations.get(INJECTED_ANNOTATION, "").partition("/")
        if separator:
            reconciler.request((owner, name))


def kopf_settings(*, namespaced: bool, timeout: int = 60) -> kopf.OperatorSettings:
    """Own names for everything that kopf could leave on objects, and watches that end by themselves.

    ``namespaced``: without the right to look at definitions and namespaces. ``timeout`` of requests in seconds.
    """
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP, key="last-handled")
    settings.process.ultimate_exiting_timeout = 10  # seconds; the kubelet's own patience is longer
    settings.scanning.disabled = namespaced
    settings.posting.enabled = False
    settings.posting.reporting_component = MANAGER
    settings.networking.request_timeout = timeout
    settings.watching.server_timeout = 10 * timeout
    settings.watching.client_timeout = 10 * timeout + 30
    settings.watching.connect_timeout = timeout
    # kopf for Python 3.10 cannot let the apiserver choose: there the handlers do.
    if hasattr(settings.watching, "label_selectors"):
        for group, version, plural in (*_CHILDREN, _PODS):
            settings.watching.label_selectors[group, version, plural] = QUEUE_LABEL
    return settings
