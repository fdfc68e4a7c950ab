"""Does an object of the apiserver already say what we want? If so, nothing is written.

The apiserver fills in defaults, other managers add fields and list entries (``drift`` looks at those), and quantities
come back in another form; none of these is a difference. A field or entry that we once set and no longer want is seen
by the hash of the manifest that an applied object carries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tq_operator.plan.names import MANAGED_BY, MANAGER, digest
from tq_operator.plan.queue import Manifest
from transfer_queue.config.defaults import GROUP
from transfer_queue.config.quantity import amount

__all__ = [
    "APPLIED_ANNOTATION",
    "contains",
    "differs",
    "foreign_owner",
    "owned_by",
    "stamped",
]

APPLIED_ANNOTATION = f"{GROUP}/applied"
# Fields that identify entries of a list. Several entries may share a value, such as two tolerations of one key.
_KEYS: Final = ("name", "mountPath", "uid", "key", "topologyKey")
_KEPT: Final = (
    *("labelSelector", "namespaceSelector", "podSelector"),  # without them less is selected than with an empty one
    *("allowPrivilegeEscalation", "automountServiceAccountToken", "enableServiceLinks", "readOnlyRootFilesystem"),
    *("maxUnavailable", "minAvailable", "replicas", "runAsGroup", "runAsNonRoot", "runAsUser"),
)
"""Fields that the apiserver keeps if they are empty, false or 0, and that mean something else if they are missing."""
_QUANTITIES: Final = ("requests", "limits", "sizeLimit", "divisor")


def stamped(manifest: Manifest) -> Manifest:
    """``manifest`` with its own hash among the annotations."""
    metadata = manifest["metadata"]
    mark = digest(json.dumps(manifest, sort_keys=True), 16)
    return {
        **manifest,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED_ANNOTATION: mark}},
    }


def differs(wanted: Manifest, observed: Manifest | None) -> bool:
    """Whether ``wanted`` (stamped) has to be applied."""
    return observed is None or not contains(observed, wanted)


def owned_by(observed: Manifest, uid: str) -> bool:
    """Whether an object names the queue with this uid as an owner."""
    return any(owner.get("uid") == uid for owner in observed["metadata"].get("ownerReferences") or [])


def foreign_owner(observed: Manifest | None, uid: str) -> bool:
    """Whether an object with the name of a child exists that does not belong to the queue with this uid.

    An object without an owner that carries the operator's labels and was applied by it is an orphan, not foreign.
    """
    if observed is None or owned_by(observed, uid):
        return False
    metadata = observed["metadata"]
    applied = APPLIED_ANNOTATION in (metadata.get("annotations") or {})
    ours = applied and (metadata.get("labels") or {}).get(MANAGED_BY) == MANAGER
    return bool(metadata.get("ownerReferences")) or not ours


def contains(observed: Any, wanted: Any, field: str = "") -> bool:
    """Whether ``observed`` contains every field of ``wanted``."""
    if isinstance(wanted, Mapping):
        if not isinstance(observed, Mapping):
            # The apiserver drops some empty objects.
            return not wanted and observed is None and field not in _KEPT
        inner = field if field in _QUANTITIES else ""
        return all(contains(observed.get(key), value, inner or key) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _contains_entries(observed or [], wanted)
    if field in _QUANTITIES and isinstance(observed, str):
        return amount(observed) == amount(str(wanted))
    return bool(observed == wanted) or (observed is None and wanted in (False, "", 0) and field not in _KEPT)


def _contains_entries(observed: Sequence[Any], wanted: Sequence[Any]) -> bool:
    for position, entry in enumerate(wanted):
        key = next((key for key in _KEYS if isinstance(entry, Mapping) and key in entry), None)
        found = list(observed[position : position + 1])
        if key is not None:
            found = [other for other in observed if other.get(key) == entry[key]]
        if not any(contains(other, entry) for other in found):
            return False
    return True if wanted and isinstance(wanted[0], Mapping) else len(observed) == len(wanted)
