"""What kopf watches: events only ask for another look at a queue. Nothing is stored on the objects, no finalizers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import kopf

from tq_operator.api.crd import PLURAL
from tq_operator.plan.names import MANAGER, QUEUE_LABEL
from tq_operator.runtime.certificates import queue_of_secret
from tq_operator.runtime.cluster import CHILD_KINDS, POD, UNWATCHED
from tq_operator.runtime.reconciler import Reconciler
from transfer_queue.config.defaults import GROUP, VERSION

__all__ = ["kopf_settings", "watch"]

_CHILDREN = {
    kind: ("".join(prefix.split("/")[2:-1]), "v1", plural)  # /api/v1 is that of the group ""
    for kind, (prefix, plural) in CHILD_KINDS.items()
    if kind not in UNWATCHED
}
_PODS = ("", "v1", "pods")
_SECRETS = ("", "v1", "secrets")
_OURS = {QUEUE_LABEL: kopf.PRESENT}


def watch(registry: kopf.OperatorRegistry, reconciler: Reconciler) -> None:
    """Ask ``reconciler`` for a queue whenever it, a child, or a pod that uses it changes."""

    # Coroutines: kopf runs plain functions on threads, and the reconciler belongs to the loop.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def queue_changed(namespace: str | None, name: str, event: Mapping[str, Any], **_: Any) -> None:
        reconciler.saw((namespace or "", name), None if event.get("type") == "DELETED" else event["object"])

    for kind, (group, version, plural) in {**_CHILDREN, POD: _PODS}.items():
        changed = _changed(kind, reconciler)
        kopf.on.event(group, version, plural, registry=registry, id=f"{plural}-changed", labels=_OURS)(changed)

    # Nothing of a Secret is kept: a look at its queue reads those that matter.
    @kopf.on.event(*_SECRETS, registry=registry, id="secrets-changed", labels=_OURS)
    async def secret_changed(event: Mapping[str, Any], **_: Any) -> None:
        if event.get("type") is not None and (key := queue_of_secret(event["object"])):
            reconciler.work.add(key)


def _changed(kind: str, reconciler: Reconciler) -> Callable[..., Coroutine[Any, Any, None]]:
    async def changed(event: Mapping[str, Any], **_: Any) -> None:
        if event.get("type") is None:  # listed: what was deleted before that is not told
            reconciler.list_soon()
        for key in reconciler.watched.take(kind, event):
            reconciler.work.add(key)

    return changed


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
        for group, version, plural in (*_CHILDREN.values(), _PODS, _SECRETS):
            settings.watching.label_selectors[group, version, plural] = QUEUE_LABEL
    return settings
