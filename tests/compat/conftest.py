from __future__ import annotations

from tests.integration.conftest import partition, queue, stack

__all__ = ["partition", "queue", "stack"]
