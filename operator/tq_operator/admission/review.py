"""AdmissionReview in, AdmissionReview out. Garbage gets an answer too, never an exception."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_operator.admission.injection import inject, patch, refused_claim, wanted_queue
from tq_operator.api.binding import Binding
from tq_operator.plan.queue import Queue, queue_from
from tq_operator.plan.step import lossy_change
from transfer_queue.config.quantity import Quantity
from transfer_queue.config.resource import TlsMode
from transfer_queue.errors import ConfigError

__all__ = [
    "MalformedReviewError",
    "Review",
    "allow",
    "bound_queue",
    "deny",
    "mutate_pod",
    "queue_of",
    "read_review",
    "validate_queue",
]


class MalformedReviewError(ValueError):
    """The request is no AdmissionReview; the text says what is missing."""


@dataclass(frozen=True)
class Review:
    """The parts of a request that matter here."""

    uid: str
    namespace: str
    subject: Mapping[str, Any]
    """The object; its structure is unchecked."""
    previous: Mapping[str, Any] | None = None
    """What an update replaces."""


def read_review(document: Any) -> Review:
    """Raises MalformedReviewError."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise MalformedReviewError("not an AdmissionReview: request.uid is missing")
    subject = request.get("object")
    if not isinstance(subject, Mapping):
        raise MalformedReviewError("not an AdmissionReview of an object: request.object is missing")
    previous = request.get("oldObject")
    return Review(
        request["uid"],
        str(request.get("namespace") or ""),
        subject,
        previous if isinstance(previous, Mapping) else None,
    )


def allow(review: Review, operations: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Let the object in, changed by a JSON patch."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": True}
    if operations:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(operations).encode()).decode()}
    return _answer(response)


def deny(review: Review, message: str, code: int = 422) -> dict[str, Any]:
    """Refuse the object; ``message`` is what a person reads."""
    return _answer({"uid": review.uid, "allowed": False, "status": {"code": code, "message": message}})


def queue_of(review: Review) -> tuple[str, str] | None:
    """(namespace, name) of the queue that a pod asks for. Raises ValueError that says what is wrong with the label."""
    return wanted_queue(review.subject, review.namespace)


def bound_queue(review: Review, bindings: Sequence[Binding]) -> tuple[str, str] | None:
    """(namespace, name) of the queue that the bindings of its namespace give to a pod that asks for none itself.

    Raises ValueError if they give it several.
    """
    if queue_of(review) is not None:
        return None  # the other webhook sees to it
    metadata = review.subject.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    chosen = [binding for binding in bindings if binding.chooses(labels or {})]
    queues = sorted({binding.queue for binding in chosen})
    if len(queues) > 1:
        names = ", ".join(sorted(binding.metadata.name for binding in chosen))
        raise ValueError(f"the TransferQueueBindings {names} give this pod different queues; narrow their selectors")
    return queues[0] if queues else None


def mutate_pod(review: Review, queue: Queue) -> dict[str, Any]:
    """Inject ``queue`` into a pod that asked for it."""
    if not queue.admits(review.namespace):
        return deny(
            review,
            f"TransferQueue {queue.namespace}/{queue.name} does not admit pods of namespace {review.namespace}; "
            f"add it to spec.access.namespaces of the queue",
            403,
        )
    if problem := _malformed_pod(review.subject):
        return deny(review, problem)
    if problem := refused_claim(review.subject, queue, review.namespace):
        return deny(review, problem)
    return allow(review, patch(review.subject, inject(review.subject, queue, review.namespace)))


def validate_queue(review: Review, default_tls: TlsMode = "off") -> dict[str, Any]:
    """Refuse a TransferQueue with the text that the library has for it, and a change that would lose rows."""
    try:
        after = queue_from(review.subject, default_tls)
    except ConfigError as error:
        return deny(review, str(error))
    if review.previous is None:
        return allow(review)
    try:
        before = queue_from(review.previous, default_tls)
    except ConfigError:  # of an older schema: it cannot be running
        return allow(review)
    used = _at(review.previous, "status", "storage", "used")
    stored = 0 if used in (None, "0") else int(Quantity(used))
    problem = lossy_change(before, after, stored > 0, stored)
    return deny(review, problem) if problem else allow(review)


def _at(document: Any, *path: str) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _malformed_pod(pod: Mapping[str, Any]) -> str:
    spec, metadata = pod.get("spec", {}), pod.get("metadata", {})
    if not isinstance(spec, Mapping) or not isinstance(metadata, Mapping):
        return "not a pod: spec and metadata must be objects"
    for key in ("containers", "initContainers", "volumes", "resourceClaims"):
        entries = spec.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            return f"not a pod: spec.{key} must be a list of objects"
        for entry in entries:
            for inner in ("env", "volumeMounts"):
                listed = entry.get(inner) or []
                if not isinstance(listed, list) or not all(isinstance(item, Mapping) for item in listed):
                    return f"not a pod: spec.{key}[].{inner} must be a list of objects"
            resources = entry.get("resources") or {}
            claims = (resources.get("claims") or []) if isinstance(resources, Mapping) else None
            if not isinstance(claims, list) or not all(isinstance(item, Mapping) for item in claims):
                return f"not a pod: spec.{key}[].resources.claims must be a list of objects"
    return ""


def _answer(response: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
