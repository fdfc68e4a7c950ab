"""Waiting for a condition instead of sleeping, and work that goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def meanwhile(work: Callable[[], None], pause_s: float = 0.1) -> Iterator[None]:
    """Call ``work`` every ``pause_s`` seconds in a thread while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(pause_s):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
