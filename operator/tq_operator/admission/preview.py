"""What admission would make of manifests, without a cluster: the pods of every kind of owner, by the same code."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tq_operator.admission.injection import inject, malformed, refused, wanted_queue
from tq_operator.plan.queue import Manifest, Queue

__all__ = ["pod_templates", "preview"]


def pod_templates(document: Any) -> Iterator[Manifest]:
    """Pods and pod templates anywhere in a manifest: whatever has a spec with containers."""
    if isinstance(document, Mapping):
        spec = document.get("spec")
        if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
            yield document  # type: ignore[misc]
            return
        for value in document.values():
            yield from pod_templates(value)
    elif isinstance(document, Sequence) and not isinstance(document, str):
        for value in document:
            yield from pod_templates(value)


def preview(document: Manifest, queues: Mapping[tuple[str, str], Queue], namespace: str) -> Manifest:
    """``document`` with every pod template that asks for a queue as its pods would be.

    Raises ValueError if a template asks for a queue that is not there, does not admit the namespace, or gives devices
    by claims that a pod there cannot have.
    """
    result = copy.deepcopy(document)
    place = str((result.get("metadata") or {}).get("namespace") or namespace)
    for template in list(pod_templates(result)):
        if problem := malformed(template):
            raise ValueError(problem)
        wanted = wanted_queue(template, place)
        if wanted is None:
            continue
        queue = queues.get(wanted)
        if queue is None:
            raise ValueError(f"TransferQueue {'/'.join(wanted)} is in none of the files; add it with -f")
        if not queue.admits(place):
            raise ValueError(f"TransferQueue {'/'.join(wanted)} does not admit pods of namespace {place}")
        if problem := refused(template, queue, place):
            raise ValueError(problem)
        template.update(inject(template, queue, place))
    return result
