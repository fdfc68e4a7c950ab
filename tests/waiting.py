"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0, pause_s: float = 0.02) -> Any:
    """The first true value of ``condition``, asked for every ``pause_s`` seconds; AssertionError naming ``what`` after
    ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what} (last: {value!r})"
        time.sleep(pause_s)


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return once ``condition`` holds, and let the loop work meanwhile; AssertionError after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
