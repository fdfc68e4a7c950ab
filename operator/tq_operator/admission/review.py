"""AdmissionReview in, AdmissionReview out. Garbage gets an answer too, never an exception."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_operator.admission.injection import inject, malformed, patch, refused, wanted_queue
from tq_operator.api.binding import Binding
from tq_operator.plan.names import QUEUE_LABEL
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
    deleted: bool = False
    """The object is deleted."""


def read_review(document: Any) -> Review:
    """Raises MalformedReviewError."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise MalformedReviewError("not an AdmissionReview: request.uid is missing")
    deleted = request.get("operation") == "DELETE"
    subject = request.get("oldObject" if deleted else "object")
    if not isinstance(subject, Mapping):
        raise MalformedReviewError("not an AdmissionReview of an object: request.object is missing")
    previous = None if deleted else request.get("oldObject")
    return Review(
        request["uid"],
        str(request.get("namespace") or ""),
        subject,
        previous if isinstance(previous, Mapping) else None,
        deleted,
    )


_POD_LIFETIME = (
    "spec.controller.durability: process outlives containers only: deleting the controller's pod loses every row, a "
    "storage unit's pod those that it could not move. Use durability: node for rows that outlive pods"
)


def allow(
    review: Review, operations: list[dict[str, Any]] | None = None, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Admit the object, changed by a JSON patch. kubectl shows ``warnings``, up to 256 characters of each."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": True}
    if warnings:
        response["warnings"] = list(warnings)
    if operations:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(operations).encode()).decode()}
    return _answer(response)


def deny(review: Review, message: str, code: int = 422) -> dict[str, Any]:
    """Refuse the object; ``message`` is what a person reads."""
    return _answer({"uid": review.uid, "allowed": False, "status": {"code": code, "message": message}})


def queue_of(review: Review) -> tuple[str, str] | None:
    """(namespace, name) of the queue that a pod asks for.

    Raises ValueError that says what is wrong with the label, or why the object is no pod at all.
    """
    if problem := malformed(review.subject):
        raise ValueError(problem)
    return wanted_queue(review.subject, review.namespace)


def bound_queue(review: Review, bindings: Sequence[Binding]) -> tuple[str, str] | None:
    """(namespace, name) of the queue that the bindings of its namespace give to a pod that asks for none itself.

    Raises ValueError if they give it several.
    """
    if queue_of(review) is not None:
        return None  # the other webhook sees to it
    labels = (review.subject.get("metadata") or {}).get("labels") or {}
    chosen = [binding for binding in bindings if binding.chooses(labels)]
    queues = sorted({binding.queue for binding in chosen})
    if len(queues) > 1:
        names = ", ".join(sorted(binding.metadata.name for binding in chosen))
        raise ValueError(f"the TransferQueueBindings {names} give this pod different queues; narrow their selectors")
    return queues[0] if queues else None


def mutate_pod(review: Review, queue: Queue) -> dict[str, Any]:
    """Inject ``queue`` into a pod that asked for it, by :func:`queue_of` or :func:`bound_queue`."""
    if not queue.admits(review.namespace):
        return deny(
            review,
            f"TransferQueue {queue.namespace}/{queue.name} does not admit pods of namespace {review.namespace}; "
            f"add it to spec.access.namespaces of the queue",
            403,
        )
    if problem := refused(review.subject, queue, review.namespace):
        return deny(review, problem)
    return allow(review, patch(review.subject, inject(review.subject, queue, review.namespace)))


def validate_queue(review: Review, default_tls: TlsMode = "off") -> dict[str, Any]:
    """Refuse a TransferQueue with the text that the library has for it, and a change that would lose rows. Warn of the
    deletion of one that is in use."""
    if review.deleted:
        return allow(review, warnings=_uses(review.subject))
    if review.previous is not None and review.previous.get("spec") == review.subject.get("spec"):
        return allow(review)  # a finalizer can be taken off whatever an older version accepted
    try:
        after = queue_from(review.subject, default_tls)
    except ConfigError as error:
        return deny(review, str(error))
    warnings = [_POD_LIFETIME] if after.spec.controller.durability == "process" else []
    if review.previous is None:
        return allow(review, warnings=warnings)
    try:
        before = queue_from(review.previous, default_tls)
    except ConfigError:  # of an older schema: it cannot be running
        return allow(review)
    used = _at(review.previous, "status", "storage", "used")
    problem = lossy_change(before, after, used not in (None, "0"), _bytes(used))
    return deny(review, problem) if problem else allow(review, warnings=warnings)


def _uses(document: Mapping[str, Any]) -> list[str]:
    """Who uses a queue, and what it holds."""
    name, pods = _at(document, "metadata", "name"), _at(document, "status", "injected")
    used = _at(document, "status", "storage", "used")
    found = []
    if isinstance(pods, int) and pods > 0:
        listed = "1 pod uses it and loses" if pods == 1 else f"{pods} pods use it and lose"
        chosen = f"kubectl get pods -A -l {QUEUE_LABEL}={name}"
        found.append(f"TransferQueue {name} is deleted while {listed} its queue: {chosen}"[:256])
    if used not in (None, "0"):
        found.append(f"TransferQueue {name} is deleted with {used} of rows, which are lost")
    return found


def _bytes(used: Any) -> int | None:
    """None if it is not known, or no number of bytes."""
    try:
        return int(Quantity(used))
    except ValueError:
        return None


def _at(document: Any, *path: str) -> Any:
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _answer(response: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
