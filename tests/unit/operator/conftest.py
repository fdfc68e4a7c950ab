"""Golden files: ``pytest tests/unit/operator --regenerate`` writes them again, for review with git diff."""

from __future__ import annotations

import pytest


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate", default=False))
