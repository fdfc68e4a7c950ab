"""Progress of long steps, on stderr so that stdout stays for what other programs read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HEARTBEAT_SECONDS = 15.0


def say(text: str) -> None:
    """Print one line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce `what`, repeat it with the elapsed time while it lasts, and say how long it took."""
    started = time.monotonic()
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"  {what}: {time.monotonic() - started:.0f} s")

    say(f"{what} …")
    heartbeat = threading.Thread(target=repeat, daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        done.set()
        heartbeat.join()
    say(f"{what}: done in {time.monotonic() - started:.1f} s")
