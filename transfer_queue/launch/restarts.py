"""Restart times of a server: at once, then with a growing back-off, like the kubelet."""

from __future__ import annotations

from dataclasses import dataclass

from transfer_queue.errors import StartError

__all__ = ["MOST_STARTS", "Restarts"]

MOST_STARTS = 4
"""Number of consecutive failed starts after which a server counts as unable to start."""
_FIRST_S = 1.0
_LONGEST_S = 60.0
_HEALTHY_S = 60.0
"""A server that served this long restarts at once when it ends."""


@dataclass
class Restarts:
    """The restarts of one server. Times are seconds on one monotonic clock."""

    endless: bool = False
    """Whether it is started again however often it failed, as the queue does not need it."""
    due: float | None = None
    """Time of the next restart; None while the server runs."""
    starting: bool = False
    """Whether the server was restarted and does not serve yet."""
    _failed: int = 0
    _delay: float = 0.0
    _served: float = 0.0

    def ended(self, now: float, reason: str) -> float:
        """Note that the server ended; return the restart delay in seconds. Raises StartError if it cannot start."""
        if self.starting:
            self._failed += 1
            if self._failed >= MOST_STARTS and not self.endless:
                raise StartError(f"{reason} ({MOST_STARTS} starts in a row failed)")
        elif now - self._served >= _HEALTHY_S:
            self._delay = 0.0
        delay, self._delay = self._delay, min(_LONGEST_S, max(_FIRST_S, 2 * self._delay))
        self.due, self.starting = now + delay, False
        return delay

    def started(self) -> None:
        """Note that a process of the server was started."""
        self.due, self.starting = None, True

    def serves(self, now: float) -> None:
        """Note that the server serves again."""
        self.starting, self._failed, self._served = False, 0, now
