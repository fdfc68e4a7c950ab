"""The controller's view of its storage units: joining, coming back, getting lost, being told what to free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from transfer_queue.control.core import ControlCore
from transfer_queue.control.records import Record, UnitJoined, UnitLost
from transfer_queue.errors import RequestError
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.entries import BlocksFenced, SavedUnit, UnitRegistered
from transfer_queue.runtime.pins import Pins
from transfer_queue.runtime.sessions import ClientSessions, UnitSession
from transfer_queue.storage.base import DEVICE
from transfer_queue.wire.messages import FreeBlocks, Join, Joined, UnitInfo, UnitReport

__all__ = ["Joining", "UnitRegistry", "pack_blocks", "unpack_blocks"]


_MOST_BLOCKS = 1 << 26
_MOST_LOST_DEVICES = 64


def pack_blocks(blocks: Iterable[int]) -> bytes:
    """Block ids -> i64 bytes."""
    return np.fromiter(blocks, dtype="<i8").tobytes()


def unpack_blocks(data: bytes) -> list[int]:
    """i64 bytes -> block ids. Raises RequestError."""
    if len(data) % 8:
        raise RequestError(f"block ids are 8 bytes each; got {len(data)} bytes")
    return np.frombuffer(data, dtype="<i8").tolist()  # type: ignore[no-any-return]


class Joining:
    """The connection of a unit that has not joined yet: what it said that it holds."""

    def __init__(self) -> None:
        self._blocks: list[int] = []

    def add(self, data: bytes) -> None:
        """Raises RequestError for what cannot be block ids, and for more of them than any unit holds."""
        self._blocks += unpack_blocks(data)
        if len(self._blocks) > _MOST_BLOCKS:
            raise RequestError(f"a unit with more than {_MOST_BLOCKS} blocks cannot join")

    def inventory(self, join: Join) -> list[int]:
        """All that the unit holds. Raises RequestError."""
        self.add(join.blocks)
        if len(self._blocks) != join.held:
            raise RequestError(f"{join.held} blocks were announced, {len(self._blocks)} listed")
        return self._blocks


class UnitRegistry:
    """Storage units by number. ``changed`` is called when clients should hear of a new list, ``record`` with what a
    restarted controller has to know, ``after`` with what is to be done once that is kept. Blocks that a unit brings
    along and that are not committed ``patience_s`` seconds later are freed."""

    def __init__(
        self,
        core: ControlCore,
        clients: ClientSessions,
        changed: Callable[[], None],
        record: Callable[[Record], None],
        after: Callable[..., None],
        patience_s: float,
    ) -> None:
        self._core = core
        self._clients = clients
        self._changed = changed
        self._record = record
        self._after = after
        self._patience_s = patience_s
        self._doubtful: deque[tuple[float, int, list[int]]] = deque()
        self.pins = Pins()
        self._units: dict[int, UnitSession] = {}
        self._lost: dict[str, UnitSession] = {}  # by incarnation; may come back with their blocks
        self._next_unit = 0

    def __iter__(self) -> Iterator[UnitSession]:
        return iter(self._units.values())

    def infos(self) -> list[UnitInfo]:
        """Units as clients shall see them: a disconnected one takes no new blocks."""
        return [
            msgspec.structs.replace(session.info, draining=session.draining or session.connection is None)
            for session in self._units.values()
        ]

    @property
    def connected(self) -> int:
        """Number of storage units of the queue that have a connection: not of GPUs of its clients."""
        return sum(item.connection is not None and DEVICE not in item.info.attributes for item in self)

    def join(self, connection: Connection, join: Join, inventory: list[int], now: float) -> Joined:
        """Register a unit that holds ``inventory``, or take back one that lost its connection."""
        session = self._same_incarnation(join)
        if session is None:
            for old in [item for item in self if item.info.name == join.name]:
                self._lose(old, now)
            for gone in [key for key, item in self._lost.items() if item.info.name == join.name]:
                del self._lost[gone]
            unit, self._next_unit = self._next_unit, self._next_unit + 1
            info = UnitInfo(unit, join.name, join.address, join.capacity, join.used, False, join.attributes)
            session = self._units[unit] = UnitSession(info, join.incarnation, connection)
            self._record(UnitRegistered(info, join.incarnation))
            self._core.unit_joined(unit, None, now)
        else:
            if session.connection is not None:
                session.connection.abort("the unit registered over another connection")
                self._core.unit_suspect(session.info.unit)
            self._units[session.info.unit] = session  # it may have been given up
            session.info = msgspec.structs.replace(
                session.info, address=join.address, used=join.used, attributes=join.attributes
            )
            self._core.unit_joined(session.info.unit, inventory, now)
        session.draining = session.retired = False
        session.connection = connection
        session.principal = "" if connection.principal is None else connection.principal.name
        connection.context = session
        connection.peer = f"storage unit {join.name}"
        unit = session.info.unit
        unlisted = session.owed.difference(inventory)  # stored and freed since the unit listed its inventory
        found = self._leave_to_writers(session, [*inventory, *unlisted], now)
        unknown = self.pins.spare(unit, self.fence(unit, found))
        session.owed.clear()
        self._changed()
        return Joined(session.info.unit, self._clients.run, pack_blocks(unknown))

    def _leave_to_writers(self, session: UnitSession, inventory: list[int], now: float) -> list[int]:
        """Blocks without rows, but for those whose writer may be about to commit them: they are looked at again."""
        unit = session.info.unit
        unknown = self._core.unknown_blocks(unit, inventory)
        doubtful = {
            block for block in unknown if block not in session.owed and self._clients.get(block >> 32) is not None
        }
        if doubtful:
            self._doubtful.append((now + self._patience_s, unit, list(doubtful)))
        return [block for block in unknown if block not in doubtful]

    def fence(self, unit: int, blocks: list[int]) -> list[int]:
        """Return the blocks among ``blocks`` that no row refers to, and refuse later commits of them."""
        unknown = self._core.unknown_blocks(unit, blocks)
        fenced = [block for block in unknown if self._clients.fence(block)]
        if fenced:
            self._record(BlocksFenced(fenced))
        return unknown

    def free(self, unit: int, blocks: list[int]) -> None:
        """Tell a unit to drop blocks. A disconnected unit hears of them when it comes back with its inventory."""
        blocks = self.pins.spare(unit, blocks)
        session = self._units.get(unit)
        if session is None or not blocks:
            return
        if session.connection is None:
            session.owed.update(blocks)
        else:
            session.connection.send(FreeBlocks(pack_blocks(blocks)))

    def report(self, session: UnitSession, report: UnitReport) -> None:
        session.info = msgspec.structs.replace(session.info, used=report.stats.used)
        session.blocks = report.stats.blocks

    def disconnected(self, session: UnitSession, connection: Connection, now: float) -> None:
        if session.connection is connection:
            session.connection = None
            session.lost_at = now
            if session.retired:
                del self._units[session.info.unit]
            else:
                self._core.unit_suspect(session.info.unit)
            self._changed()

    # ------------------------------------------------------------------------------------------------------- draining

    def named(self, name: str) -> UnitSession:
        """Raises RequestError."""
        session = next((item for item in self if item.info.name == name), None)
        if session is None:
            known = ", ".join(sorted(item.info.name for item in self)) or "none"
            raise RequestError(f"there is no storage unit {name!r}; there are: {known}")
        return session

    def numbered(self, unit: int) -> UnitSession | None:
        return self._units.get(unit)

    def drain(self, session: UnitSession, stop: bool) -> None:
        """The unit takes no new blocks, or with ``stop`` some again."""
        if session.draining == stop:
            session.draining = not stop
            if session.retired:
                session.retired = False
                self._core.unit_joined(session.info.unit)
            self._changed()

    def is_drained(self, session: UnitSession) -> bool:
        """It takes no new blocks, and no row needs one that it has."""
        unit, state = session.info.unit, self._core.state
        return session.draining and not len(state.blocks.slots_of_unit(unit)) and not state.moves.arrive_at(unit)

    def retire(self, unit: int, now: float) -> bool:
        """An empty, draining unit is about to end; False: it is neither."""
        session = self._units.get(unit)
        if session is None or session.retired:
            return session is not None
        if not self.is_drained(session):
            return False
        session.retired = True
        self._core.unit_lost(unit, now)
        return True

    def expire(self, before: float, now: float) -> None:
        """Give up units that have been away since earlier than ``before``, and blocks that nobody committed."""
        for session in [item for item in self if item.connection is None and item.lost_at < before]:
            self._lose(session, now)
            self._changed()
        while self._doubtful and self._doubtful[0][0] <= now:
            _, unit, blocks = self._doubtful.popleft()
            self._after(self.free, unit, self.fence(unit, blocks))

    # ----------------------------------------------------------------------------------------------------- durability

    def saved(self) -> tuple[list[SavedUnit], list[SavedUnit], int]:
        """Units, those that were given up, and the next number."""
        units, lost = (
            [SavedUnit(session.info, session.incarnation) for session in sessions.values() if not session.retired]
            for sessions in (self._units, self._lost)
        )
        return units, lost, self._next_unit

    def restore(self, units: list[SavedUnit], lost: list[SavedUnit], next_unit: int) -> None:
        """Units of an earlier life of this controller; they are expected back."""
        for saved in units:
            self._units[saved.info.unit] = UnitSession(saved.info, saved.incarnation, None)
        for saved in lost:
            self._keep_lost(UnitSession(saved.info, saved.incarnation, None))
        self._next_unit = next_unit

    def replay(self, entry: Record) -> None:
        """Apply a journal entry: a unit was registered, lost, or came back."""
        if isinstance(entry, UnitRegistered):
            for gone in [key for key, item in self._lost.items() if item.info.name == entry.info.name]:
                del self._lost[gone]
            self._units[entry.info.unit] = UnitSession(entry.info, entry.incarnation, None)
            self._next_unit = max(self._next_unit, entry.info.unit + 1)
        elif isinstance(entry, UnitLost) and entry.unit in self._units:
            self._keep_lost(self._units.pop(entry.unit))
        elif isinstance(entry, UnitJoined):
            for key, session in list(self._lost.items()):
                if session.info.unit == entry.unit:
                    self._units[entry.unit] = self._lost.pop(key)

    def expect_back(self, by: float) -> None:
        """After a restart: units that are not back at ``by`` are given up when their grace is over."""
        for session in self._units.values():
            session.lost_at = by

    # --------------------------------------------------------------------------------------------------------- losing

    def _lose(self, session: UnitSession, now: float) -> None:
        del self._units[session.info.unit]
        self._keep_lost(session)
        self._core.unit_lost(session.info.unit, now)
        if session.connection is not None:
            connection, session.connection = session.connection, None
            connection.abort("another unit registered under the same name")

    def _keep_lost(self, session: UnitSession) -> None:
        """It may come back with its blocks. Of GPUs of clients, whose names are not used again, the newest stay."""
        self._lost[session.incarnation] = session
        devices = [key for key, item in self._lost.items() if DEVICE in item.info.attributes]
        for key in devices[:-_MOST_LOST_DEVICES]:
            del self._lost[key]

    def _same_incarnation(self, join: Join) -> UnitSession | None:
        for session in self._units.values():
            if session.incarnation == join.incarnation:
                return session
        return self._lost.pop(join.incarnation, None)
