"""The bound of the answers that the peers of one server leave unread, all together."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Unsent"]

_MADE_IN_ALL = 256 << 20
"""Bytes of answers made for the peers of a server and not taken by them. Nearer to it, each may leave fewer unread."""
_MADE_LEAST = 1 << 20
"""So many a peer may always leave unread."""


@dataclass(slots=True)
class Unsent:
    """What all connections of a server have made for answers and not sent. Payloads, which are views, do not count."""

    nbytes: int = 0

    @property
    def allowance(self) -> int:
        """Bytes that one connection may leave unsent at present."""
        return max(_MADE_LEAST, (_MADE_IN_ALL - self.nbytes) // 2)
