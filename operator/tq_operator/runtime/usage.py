"""How much the storage units hold, asked from the controller's metrics."""

from __future__ import annotations

import http.client
import math

from prometheus_client.parser import text_string_to_metric_families

from tq_operator.runtime.fetch import fetch

__all__ = ["stored_bytes"]


def stored_bytes(url: str) -> int | None:
    """Bytes over all storage units; None if the controller does not say, or waits for units: of those it knows no more
    than when they registered."""
    try:
        status, body = fetch(url)
        samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
    except (OSError, http.client.HTTPException, ValueError):
        return None
    if status != 200:
        return None
    used = [sample.value for sample in samples if sample.name == "tq_unit_used_bytes"]
    connected = next((sample.value for sample in samples if sample.name == "tq_units_connected"), 0)
    total = sum(used)
    return int(total) if used and connected >= len(used) and math.isfinite(total) else None
