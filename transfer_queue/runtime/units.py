"""The controller's view of its storage units: joining, coming back, getting lost, being told what to free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from transfer_queue.control.core import ControlCore
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.pins import Pins
from transfer_queue.runtime.sessions import ClientSessions, UnitSession
from transfer_queue.wire.messages import FreeBlocks, Join, Joined, UnitInfo, UnitReport

__all__ = ["UnitRegistry", "pack_blocks", "unpack_blocks"]


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Block ids -> i64 bytes."""
    return np.fromiter(blocks, dtype="<i8").tobytes()


def unpack_blocks(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i8").tolist()  # type: ignore[no-any-return]


class UnitRegistry:
    """Storage units by number. ``changed`` is called when clients should hear of a new list."""

    def __init__(self, core: ControlCore, clients: ClientSessions, run: str, changed: Callable[[], None]) -> None:
        self._core = core
        self._clients = clients
        self._run = run
        self._changed = changed
        self.pins = Pins()
        self._units: dict[int, UnitSession] = {}
        self._lost: dict[str, UnitSession] = {}  # by incarnation; may come back with their blocks
        self._next_unit = 0

    def __iter__(self) -> Iterator[UnitSession]:
        return iter(self._units.values())

    def infos(self) -> list[UnitInfo]:
        """Units as clients shall see them: a disconnected one takes no new blocks."""
        return [
            session.info if session.connection else msgspec.structs.replace(session.info, draining=True)
            for session in self._units.values()
        ]

    @property
    def connected(self) -> int:
        return sum(session.connection is not None for session in self._units.values())

    def join(self, connection: Connection, join: Join, now: float) -> Joined:
        """Register a unit, or take back one that lost its connection."""
        inventory = unpack_blocks(join.blocks)
        session = self._same_incarnation(join)
        if session is None:
            for old in [item for item in self if item.info.name == join.name]:
                self._lose(old, now)
            for gone in [key for key, item in self._lost.items() if item.info.name == join.name]:
                del self._lost[gone]
            unit, self._next_unit = self._next_unit, self._next_unit + 1
            info = UnitInfo(unit, join.name, join.address, join.capacity, join.used, False, join.attributes)
            session = self._units[unit] = UnitSession(info, join.incarnation, connection)
            self._core.unit_joined(unit)
        elif session.connection is not None:
            session.connection.abort("the unit registered over another connection")
        elif session.info.unit not in self._units:  # it had been given up
            self._units[session.info.unit] = session
            self._core.unit_joined(session.info.unit, inventory)
        session.connection = connection
        connection.context = session
        connection.peer = f"storage unit {join.name}"
        unknown = self.pins.spare(session.info.unit, self.fence(session.info.unit, inventory))
        self._changed()
        return Joined(session.info.unit, self._run, pack_blocks(unknown))

    def fence(self, unit: int, blocks: list[int]) -> list[int]:
        """Those of ``blocks`` that no row refers to; commits that come for them from now on are refused."""
        unknown = self._core.unknown_blocks(unit, blocks)
        for block in unknown:
            writer = self._clients.get(block >> 32)
            if writer is not None:
                writer.fenced.add(block)
        return unknown

    def free(self, unit: int, blocks: list[int]) -> None:
        """Tell a unit to drop blocks. A disconnected unit hears of them when it comes back with its inventory."""
        blocks = self.pins.spare(unit, blocks)
        session = self._units.get(unit)
        if session is not None and session.connection is not None and blocks:
            session.connection.send(FreeBlocks(pack_blocks(blocks)))

    def report(self, session: UnitSession, report: UnitReport) -> None:
        session.info = msgspec.structs.replace(session.info, used=report.stats.used)
        session.blocks = report.stats.blocks

    def disconnected(self, session: UnitSession, connection: Connection, now: float) -> None:
        if session.connection is connection:
            session.connection = None
            session.lost_at = now
            self._changed()

    def expire(self, before: float, now: float) -> None:
        """Give up units that have been away since earlier than ``before``: their rows are lost."""
        for session in [item for item in self if item.connection is None and item.lost_at < before]:
            self._lose(session, now)
            self._changed()

    def _lose(self, session: UnitSession, now: float) -> None:
        del self._units[session.info.unit]
        self._lost[session.incarnation] = session
        self._core.unit_lost(session.info.unit, now)
        if session.connection is not None:
            connection, session.connection = session.connection, None
            connection.abort("another unit registered under the same name")

    def _same_incarnation(self, join: Join) -> UnitSession | None:
        for session in self._units.values():
            if session.incarnation == join.incarnation:
                return session
        return self._lost.pop(join.incarnation, None)
