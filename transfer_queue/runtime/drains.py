"""The controller's part in emptying a storage unit: no new blocks there, and rows follow the copies of their blocks."""

from __future__ import annotations

from transfer_queue.control.commands import Value
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import RequestError
from transfer_queue.runtime.sessions import ClientSession
from transfer_queue.runtime.units import UnitRegistry
from transfer_queue.wire.messages import Drain, Relocate, Retire

__all__ = ["Drains"]


class Drains:
    """Clients do the copying (``client.draining``), so that it works with every backend and costs the controller
    nothing. Nothing of a drain outlives the client that asks for it, but for the rows it moved."""

    def __init__(self, core: ControlCore, units: UnitRegistry) -> None:
        self._core = core
        self._units = units

    def serve(self, session: ClientSession, body: Drain | Relocate | Retire, now: float) -> Value:
        """Raises RequestError, DataLostError."""
        if isinstance(body, Drain):
            return self._drain(body)
        if isinstance(body, Retire):
            return Value(self._units.retire(body.unit, now))
        for _, _, copy in body.moves:
            if copy >> 32 != session.writer or copy in session.fenced:
                raise RequestError(f"block {copy:#x} was not written by this client session, or was freed already")
        moved = self._core.move_blocks(body.unit, body.moves)
        for _, _, copy in body.moves:
            session.announced.pop(copy, None)
        return Value(moved)

    def _drain(self, body: Drain) -> Value:
        unit = self._units.drain(body.name, body.stop).info.unit
        table = self._core.blocks
        slots = table.slots_of_unit(unit)[: max(0, body.most)]
        blocks, nbytes = (column.array[slots].astype("<i8").tobytes() for column in (table.block, table.nbytes))
        return Value({"unit": unit, "blocks": blocks, "nbytes": nbytes, "partitions": self._core.partitions_at(slots)})
