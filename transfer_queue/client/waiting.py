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


class Waits:
    """The waits of one client's calls. Calls that wait for the same server share one warning."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def on(self, what: str, until: float, reason: Callable[[], str]) -> _Wait:
        """Warn while a ``with`` block takes longer than 1.5 seconds, and again every 10 seconds.

        Args:
            what: The server and its address.
            until: Time of the event loop when the wait is given up.
            reason: Called for the cause when a warning is due; empty if there is nothing to say.
        """
        return _Wait(self._said, what, until, reason)


class _Wait:
    __slots__ = ("_loop", "_reason", "_said", "_since", "_timer", "_until", "_what")

    def __init__(self, said: dict[str, float], what: str, until: float, reason: Callable[[], str]) -> None:
        self._said = said
        self._what = what
        self._until = until
        self._reason = reason

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(_FIRST_S, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        reason = self._reason()
        due = bool(reason) and now - self._said.get(self._what, -_AGAIN_S) >= _AGAIN_S - _FIRST_S
        if due:
            self._said[self._what] = now
            since, until = (
                (datetime.now() + timedelta(seconds=min(at - now, 1e6))).strftime("%H:%M:%S")
                for at in (self._since, self._until)
            )
            log.warning("waiting for %s since %s, until %s at the latest: %s", self._what, since, until, reason)
        self._timer = self._loop.call_later(_AGAIN_S if due else _FIRST_S, self._look)
