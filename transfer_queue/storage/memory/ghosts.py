"""Ghosts: clients of a storage unit whose connection is lost, but which may still read and write its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from transfer_queue.storage.memory.liveness import holds_lock

__all__ = ["Ghosts", "PeerState"]

_POLL_S = 0.5


@dataclass(eq=False)
class PeerState:
    """What a client may touch. It holds its lock, or one of ``locks`` from ``lock`` on, as long as it may."""

    name: str
    lock: int
    locks: int = 1
    unsealed: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)


class Ghosts:
    """Calls ``bury`` once a client has let go of its lock in the arena's file, which is open as ``descriptor``."""

    def __init__(self, descriptor: int, bury: Callable[[PeerState], None]) -> None:
        self._descriptor = descriptor
        self._bury = bury
        self._states: list[PeerState] = []
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[PeerState]:
        return iter(self._states)

    def add(self, state: PeerState) -> None:
        """Bury the client, now or when it has let go."""
        if not self._buried(state):
            self._states.append(state)
            self._watch()

    def check(self) -> None:
        """Bury those that have let go."""
        self._timer = None
        self._states = [state for state in self._states if not self._buried(state)]
        if self._states:
            self._watch()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _buried(self, state: PeerState) -> bool:
        if holds_lock(self._descriptor, state.lock, state.locks):
            return False
        self._bury(state)
        return True

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_POLL_S, self.check)
