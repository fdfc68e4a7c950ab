"""ConversionReview in, ConversionReview out: one object in another version of the API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tq_operator.admission.review import MalformedReviewError
from transfer_queue.config.defaults import GROUP, SERVED_VERSIONS

__all__ = ["convert_review"]

_VERSIONS = tuple(f"{GROUP}/{version}" for version in SERVED_VERSIONS)


def convert_review(document: Any) -> dict[str, Any]:
    """The answer, also if an object cannot be converted. Raises MalformedReviewError."""
    request = document.get("request") if isinstance(document, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise MalformedReviewError("not a ConversionReview: request.uid is missing")
    objects = request.get("objects")
    if not isinstance(objects, list):
        raise MalformedReviewError("not a ConversionReview: request.objects must be a list")
    response: dict[str, Any] = {"uid": request["uid"]}
    try:
        response["convertedObjects"] = [_converted(item, request.get("desiredAPIVersion")) for item in objects]
        response["result"] = {"status": "Success"}
    except ValueError as error:
        response["result"] = {"status": "Failure", "message": str(error)}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "response": response}


def _converted(item: Any, desired: Any) -> dict[str, Any]:
    """The versions have one shape so far, so that only the name changes."""
    given = item.get("apiVersion") if isinstance(item, Mapping) else None
    for version in (given, desired):
        if version not in _VERSIONS:
            raise ValueError(f"cannot convert {given} to {desired}; this operator knows {', '.join(_VERSIONS)}")
    return {**item, "apiVersion": desired}
