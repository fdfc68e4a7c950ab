"""Hypothesis profiles: ``ci`` by default; for millions of steps:

HYPOTHESIS_PROFILE=nightly pytest --timeout 0 tests/unit/control
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=_slow)
settings.register_profile(
    "nightly", max_examples=50_000, stateful_step_count=80, deadline=None, suppress_health_check=_slow
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
