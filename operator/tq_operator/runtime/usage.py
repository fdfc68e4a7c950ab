"""How much the storage units hold, asked from the controller's metrics."""

from __future__ import annotations

import http.client
import math
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tq_operator.runtime.fetch import fetch

__all__ = ["Usage", "storage_usage", "together"]


class Usage(NamedTuple):
    """``used``: bytes over all storage units; None if the controller does not say, or waits for units: of those it
    knows no more than when they registered. ``drained``: names of units that have no rows and get none."""

    used: int | None = None
    drained: frozenset[str] = frozenset()


def storage_usage(url: str) -> Usage:
    try:
        status, body = fetch(url)
        samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    except (OSError, http.client.HTTPException, ValueError):
        return Usage()
    if status != 200:
        return Usage()
    used = [sample.value for sample in samples if sample.name == "tq_unit_used_bytes"]
    connected = next((sample.value for sample in samples if sample.name == "tq_units_connected"), 0)
    drained = {s.labels["unit"] for s in samples if s.name == "tq_unit_drained" and s.value == 1}
    total = sum(used)
    known = used and connected >= len(used) and math.isfinite(total)
    return Usage(int(total) if known else None, frozenset(drained))


def together(usages: Sequence[Usage]) -> Usage:
    """What several controllers of one queue say: nothing is known that one of them does not know."""
    used = [usage.used for usage in usages]
    known = [each for each in used if each is not None]
    drained = frozenset.intersection(*(usage.drained for usage in usages))
    return Usage(max(known) if len(known) == len(used) else None, drained)
