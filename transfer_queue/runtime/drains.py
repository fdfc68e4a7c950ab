"""The controller's part in emptying a storage unit: no new blocks there, and rows follow the copies of their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer_queue.control.commands import Value
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import RequestError
from transfer_queue.runtime.sessions import ClientSession, UnitSession
from transfer_queue.runtime.units import UnitRegistry
from transfer_queue.wire.messages import Drain, Relocate, Retire

if TYPE_CHECKING:
    from transfer_queue.runtime.access import Principal

__all__ = ["Drains"]


class Drains:
    """Clients do the copying (``client.draining``), so that it works with every backend and costs the controller
    nothing. Nothing of a drain outlives the client that asks for it, but for the rows it moved."""

    def __init__(self, core: ControlCore, units: UnitRegistry) -> None:
        self._core = core
        self._units = units

    def serve(
        self, session: ClientSession, body: Drain | Relocate | Retire, principal: Principal | None, now: float
    ) -> Value:
        """Raises RequestError, NotAuthorizedError, DataLostError."""
        found = self._units.named(body.name) if isinstance(body, Drain) else self._units.numbered(body.unit)
        if principal is not None:  # a unit that is not here is nobody's own
            principal.check_unit(type(body).__name__, "" if found is None else found.principal)
        if isinstance(body, Drain):
            return self._drain(self._units.named(body.name), body)
        if isinstance(body, Retire):
            return Value(self._units.retire(body.unit, now))
        for _, _, copy in body.moves:
            if copy >> 32 != session.writer or copy in session.fenced:
                raise RequestError(f"block {copy:#x} was not written by this client session, or was freed already")
        moved = self._core.move_blocks(body.unit, body.moves)
        for _, _, copy in body.moves:
            session.announced.pop(copy, None)
        return Value(moved)

    def _drain(self, session: UnitSession, body: Drain) -> Value:
        self._units.drain(session, body.stop)
        unit = session.info.unit
        table = self._core.state.blocks
        slots = table.slots_of_unit(unit)[: max(0, body.most)]
        blocks, nbytes = (column.array[slots].astype("<i8").tobytes() for column in (table.block, table.nbytes))
        return Value({"unit": unit, "blocks": blocks, "nbytes": nbytes, "partitions": self._core.partitions_at(slots)})
