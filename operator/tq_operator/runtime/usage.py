"""How much the storage units hold, asked from the controller's metrics."""

from __future__ import annotations

import http.client
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Usage", "storage_usage"]

_TIMEOUT_S = 2.0
# The controller is in the cluster; a proxy of the environment is not meant for it.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Usage(NamedTuple):
    """``used``: bytes over all storage units; None if the controller does not say, or waits for units: of those it
    knows no more than when they registered. ``drained``: names of units that have no rows and get none."""

    used: int | None = None
    drained: frozenset[str] = frozenset()


def storage_usage(url: str) -> Usage:
    try:
        with _opener.open(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except (OSError, http.client.HTTPException, ValueError):
        return Usage()
    used = [sample.value for sample in samples if sample.name == "tq_unit_used_bytes"]
    connected = next((sample.value for sample in samples if sample.name == "tq_units_connected"), 0)
    drained = {s.labels["unit"] for s in samples if s.name == "tq_unit_drained" and s.value == 1}
    return Usage(int(sum(used)) if used and connected >= len(used) else None, frozenset(drained))
