"""Delays between attempts."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff", "chance"]


chance = random.SystemRandom().random
"""Returns a number from 0 to 1. It neither uses nor moves the state of ``random``, which programs seed."""


class Backoff:
    """Delays that double from ``first_s`` to ``most_s`` seconds.

    Args:
        first_s: The first delay in seconds.
        most_s: The longest delay in seconds.
        spread: Share of each delay that is random, from 0 to 1. With 1 the delay is anywhere from 0 to its bound, so
            that thousands of clients which lose a server at the same moment do not come back together.
        chance: Returns a number from 0 to 1.
    """

    def __init__(
        self, first_s: float, most_s: float, spread: float = 0.0, chance: Callable[[], float] = chance
    ) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.spread = spread
        self._chance = chance
        self._bound_s = first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        bound, self._bound_s = min(self._bound_s, self.most_s), 2 * min(self._bound_s, self.most_s)
        return bound * (1 - self.spread * (1 - self._chance())) if self.spread else bound

    def reset(self) -> None:
        """Start with the first delay again, after a success."""
        self._bound_s = self.first_s
