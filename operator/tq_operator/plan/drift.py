"""What others added to an object of ours, and the object without it.

Server-side apply sets the fields of our manifest and leaves all others, so what somebody adds by hand stays for ever: a
key of a selector, a second port, ``hostNetwork``. The apiserver records in ``managedFields`` who set which field, and
defaults are nobody's. So a field is drift if another manager set it and our manifest lacks it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tq_operator.plan.difference import contains
from tq_operator.plan.names import MANAGER
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import GROUP

__all__ = ["IGNORE_DRIFT_ANNOTATION", "drift", "foreign_entries", "managed_fields_cleared", "repair"]

IGNORE_DRIFT_ANNOTATION = f"{GROUP}/ignore-drift"
"""On a child: paths such as ``spec.template.spec.hostNetwork``, comma-separated, that others may set."""

_ROOTS: Final = {
    "ConfigMap": ("data", "binaryData", "immutable"),
    "Deployment": ("spec",),
    "NetworkPolicy": ("spec",),
    "PodDisruptionBudget": ("spec",),
    "Service": ("spec",),
    "StatefulSet": ("spec",),
}
"""Fields that only the operator sets. The specs of other kinds cannot change."""
_ALLOWED: Final = (
    "spec.clusterIP",
    "spec.clusterIPs",
    "spec.ipFamilies",
    "spec.ipFamilyPolicy",
    "spec.replicas",
    "spec.template.metadata",
    "spec.volumeClaimTemplates",
)
"""Fields that the apiserver allocates, replica counts, marks such as ``kubectl rollout restart`` sets, and a list with
defaults that nobody can change."""
_UNKNOWN: Final = "before-first-apply"
"""Owner of all fields of an object, including defaults, after its ``managedFields`` were cleared."""
_KEYS: Final = (("mountPath",), ("port", "protocol"), ("containerPort", "protocol"), ("name",), ("topologyKey",))
"""Fields that identify entries of a list, as the apiserver has them."""


_ALIASES: Final = {"serviceAccountName": "serviceAccount"}
"""Older names of fields. The apiserver fills them in without an owner, and restores the field from them."""


class _Entry(NamedTuple):
    """Identify an entry of a list by the fields that name it."""

    keys: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "/".join(str(value) for _, value in self.keys)

    def at(self, entries: Any) -> int | None:
        for position, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, Mapping) and all(_value(entry, name) == value for name, value in self.keys):
                return position
        return None


_Step = str | _Entry


def drift(wanted: Manifest, observed: Manifest | None) -> list[str]:
    """Dotted paths of the fields that others added to ``observed``, except fields that its annotation allows."""
    return sorted({_dotted(path) for path in _paths(wanted, observed)})


def repair(wanted: Manifest, observed: Manifest) -> list[dict[str, Any]]:
    """The JSON patch that takes all drift out of ``observed``, as it is with this resourceVersion, and ends the
    ownership of the others. Where taking out alone would not be valid, such as a port under another number, ours is
    put in at once. After the ``managedFields`` were cleared, every field that our manifest lacks goes, and the
    apiserver fills in the defaults."""
    result = copy.deepcopy(observed)
    for path in _paths(wanted, observed, unrecorded=managed_fields_cleared(observed)):
        _take_out(result, path)
    metadata = observed["metadata"]
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]}
    ]
    for root in _ROOTS.get(wanted["kind"], ()):
        value = _overlaid(result.get(root), wanted[root]) if root in wanted else None
        if value is not None:
            operations.append({"op": "add", "path": f"/{root}", "value": value})
        elif root in observed:
            operations.append({"op": "remove", "path": f"/{root}"})
    foreign = foreign_entries(observed)
    kept = [entry for entry in metadata.get("managedFields") or [] if entry not in foreign]
    return [*operations, {"op": "add", "path": "/metadata/managedFields", "value": kept}]


def managed_fields_cleared(observed: Manifest | None) -> bool:
    """Whether somebody cleared the ``managedFields``: of what changes then, the apiserver does not know who changed it,
    until we apply the object."""
    return observed is not None and observed["metadata"].get("managedFields") == []


def foreign_entries(observed: Manifest) -> list[dict[str, Any]]:
    """Entries of ``managedFields`` of other managers. Entries of a subresource, such as the scale, are not drift."""
    return [
        entry
        for entry in observed["metadata"].get("managedFields") or []
        if (entry.get("manager"), entry.get("operation")) != (MANAGER, "Apply")
        and entry.get("manager") != _UNKNOWN
        and not entry.get("subresource")
    ]


def _paths(wanted: Manifest, observed: Manifest | None, *, unrecorded: bool = False) -> list[tuple[_Step, ...]]:
    """Fields of others that ``wanted`` lacks: those that ``managedFields`` record, or all if ``unrecorded``."""
    if observed is None or wanted["kind"] not in _ROOTS:
        return []
    annotations = observed["metadata"].get("annotations") or {}
    named = [path.strip() for path in str(annotations.get(IGNORE_DRIFT_ANNOTATION, "")).split(",")]
    allowed = (*_ALLOWED, *filter(None, named))
    found: list[tuple[_Step, ...]] = []
    recorded = [entry.get("fieldsV1") or {} for entry in foreign_entries(observed)]
    for fields in [_fields(observed)] if unrecorded else recorded:
        ours = {f"f:{root}": fields[f"f:{root}"] for root in _ROOTS[wanted["kind"]] if f"f:{root}" in fields}
        for path in _added(ours, wanted, observed, ()):
            text = _dotted(path)
            if path not in found and not any(text == each or text.startswith(f"{each}.") for each in allowed):
                found.append(path)
    return found


def _fields(value: Any) -> dict[str, Any]:
    """Every field of ``value``, in the form of ``fieldsV1``."""
    if isinstance(value, Mapping):
        return {f"f:{name}": _fields(inner) for name, inner in value.items()}
    keys = _keys(value) if isinstance(value, list) else None
    if keys is None:
        return {}
    return {f"k:{json.dumps({name: _value(entry, name) for name in keys})}": _fields(entry) for entry in value}


def _added(
    fields: Mapping[str, Any], wanted: Any, observed: Any, path: tuple[_Step, ...]
) -> Iterator[tuple[_Step, ...]]:
    """Paths of ``fields`` (``fieldsV1``) that ``observed`` still has and ``wanted`` lacks."""
    for name, inner in fields.items():
        step = _step(name)
        if step is None:
            continue
        theirs, ours = _child(observed, step), _child(wanted, step)
        if theirs is None:
            continue
        if ours is None:
            yield (*path, step)
        elif inner:
            yield from _added(inner, ours, theirs, (*path, step))
        elif _has_more(theirs, ours):
            yield (*path, step)


def _has_more(theirs: Any, ours: Any) -> bool:
    """Whether others added to a mapping or list that is set as one value, such as the selector of a Service."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return any(name not in ours or _has_more(value, ours[name]) for name, value in theirs.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(theirs) > len(ours) or any(map(_has_more, theirs, ours))
    return False


def _step(name: str) -> _Step | None:
    kind, _, text = name.partition(":")
    if kind == "f":
        return text
    return _Entry(tuple(json.loads(text).items())) if kind == "k" else None


def _child(parent: Any, step: _Step) -> Any:
    if isinstance(step, _Entry):
        position = step.at(parent)
        return None if position is None else parent[position]
    return parent.get(step) if isinstance(parent, Mapping) else None


def _value(entry: Mapping[str, Any], name: str) -> Any:
    return entry.get(name, "TCP" if name == "protocol" else None)


def _dotted(path: Sequence[_Step]) -> str:
    return ".".join(map(str, path))


def _take_out(manifest: Any, path: Sequence[_Step]) -> None:
    *parents, last = path
    inner = manifest
    for step in parents:
        inner = _child(inner, step)
        if inner is None:
            return
    if isinstance(last, _Entry):
        if (position := last.at(inner)) is not None:
            del inner[position]
    else:
        inner.pop(last, None)
        inner.pop(_ALIASES.get(last, ""), None)


def _keys(entries: list[Any]) -> tuple[str, ...] | None:
    """The fields that identify the entries of a list; None if it is set as one value."""
    if not entries or not all(isinstance(each, Mapping) for each in entries):
        return None
    return next((keys for keys in _KEYS if all(keys[0] in each for each in entries)), None)


def _overlaid(observed: Any, wanted: Any) -> Any:
    """Return ``observed`` with every field of ``wanted``."""
    if contains(observed, wanted):
        return observed
    if isinstance(observed, Mapping) and isinstance(wanted, Mapping):
        return {**observed, **{name: _overlaid(observed.get(name), value) for name, value in wanted.items()}}
    if isinstance(observed, list) and isinstance(wanted, list):
        return _overlaid_list(observed, wanted)
    return wanted


def _overlaid_list(observed: list[Any], wanted: list[Any]) -> list[Any]:
    keys = _keys([*observed, *wanted])
    if keys is None:
        return wanted

    def identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(_value(entry, name) for name in keys)

    theirs = {identity(entry): entry for entry in observed}
    ours = {identity(entry) for entry in wanted}
    return [
        *(_overlaid(theirs.get(identity(entry)), entry) for entry in wanted),
        *(entry for entry in observed if identity(entry) not in ours),
    ]
