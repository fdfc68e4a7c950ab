"""When a server that ended is started again: at once, then more and more seldom, as the kubelet does."""

from __future__ import annotations

from dataclasses import dataclass

from transfer_queue.errors import StartError

__all__ = ["MOST_STARTS", "Restarts"]

MOST_STARTS = 4
"""Starts in a row that fail before a server counts as one that cannot start."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
_HEALTHY_S = 60.0
"""A server that served this long starts at once when it ends."""


@dataclass
class Restarts:
    """The restarts of one server. Times are seconds on one monotonic clock."""

    due: float | None = None
    """When it is started again; None while it runs."""
    starting: bool = False
    """It was started again and does not serve yet."""
    _failed: int = 0
    _delay: float = 0.0
    _served: float = 0.0

    def ended(self, now: float, reason: str) -> float:
        """The server ended; returns in how many seconds it is started again. Raises StartError if it cannot start."""
        if self.starting:
            self._failed += 1
            if self._failed >= MOST_STARTS:
                raise StartError(f"{reason} ({MOST_STARTS} starts in a row failed)")
        elif now - self._served >= _HEALTHY_S:
            self._delay = 0.0
        delay, self._delay = self._delay, min(_LONGEST_S, max(_FIRST_S, 2 * self._delay))
        self.due, self.starting = now + delay, False
        return delay

    def started(self) -> None:
        """A process of it was started."""
        self.due, self.starting = None, True

    def serves(self, now: float) -> None:
        """It serves again."""
        self.starting, self._failed, self._served = False, 0, now
