"""Warnings about calls that wait: each warning names the server and the reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType

__all__ = ["Waits"]

log = logging.getLogger(__name__)

_FIRST_S = 1.5
"""Time after which a waiting call logs the first warning."""
_AGAIN_S = 10.0
_LEAST_S = 0.1
"""Shortest time between two looks at the waits."""


class Waits:
    """The waits of one client's calls. Calls that wait for the same server share one warning."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}
        self._active: dict[_Wait, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def on(self, what: str, until: float, reason: Callable[[], str]) -> _Wait:
        """Warn while a ``with`` block takes longer than 1.5 seconds, and again every 10 seconds.

        Args:
            what: The server and its address.
            until: Time of the event loop when the wait is given up.
            reason: Called for the cause when a warning is due; empty if there is nothing to say.
        """
        return _Wait(self, what, until, reason)

    def _enter(self, wait: _Wait) -> None:
        self._active[wait] = None
        if self._timer is None or wait.look_at < self._timer_at:
            self._schedule(wait.loop, wait.look_at)

    def _schedule(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """One timer for all waits: most of them are over long before it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(at, self._look, loop), at

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for wait in [wait for wait in self._active if wait.look_at <= now]:
            wait.look(self._said, now)
        self._timer = None
        if self._active:
            self._schedule(loop, max(min(wait.look_at for wait in self._active), now + _LEAST_S))


class _Wait:
    __slots__ = ("_reason", "_since", "_until", "_waits", "_what", "look_at", "loop")

    def __init__(self, waits: Waits, what: str, until: float, reason: Callable[[], str]) -> None:
        self._waits = waits
        self._what = what
        self._until = until
        self._reason = reason

    def __enter__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._since = self.loop.time()
        self.look_at = self._since + _FIRST_S
        self._waits._enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waits._active.pop(self, None)

    def look(self, said: dict[str, float], now: float) -> None:
        """Warn if that is due. ``said``: when a warning was logged last, by server."""
        reason = self._reason()
        due = bool(reason) and now - said.get(self._what, -_AGAIN_S) >= _AGAIN_S - _FIRST_S
        if due:
            said[self._what] = now
            since, until = (
                (datetime.now() + timedelta(seconds=min(at - now, 1e6))).strftime("%H:%M:%S")
                for at in (self._since, self._until)
            )
            log.warning("waiting for %s since %s, until %s at the latest: %s", self._what, since, until, reason)
        self.look_at = now + (_AGAIN_S if due else _FIRST_S)
