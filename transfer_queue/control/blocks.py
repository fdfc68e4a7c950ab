"""The table of stored blocks: 37 bytes each, columns instead of objects.

Rows refer to a block by its *slot* in this table. Slot 0 is never used: a cell's slot is 0 where nothing was written,
and the negated slot where the bytes are lost with their storage unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from transfer_queue.control.arrays import Ints, Table
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.effects import EffectLog
from transfer_queue.control.schema import PutSchema, SchemaTable

__all__ = ["COLUMNS", "BlockTable"]

_FEW = 8
"""Cells that are released are counted by sorting them if they are fewer than one in so many slots."""


class BlockTable:
    """Per slot: unit, block id, ordinal of the row that is the block's row 0 (-1: the rows are scattered, each cell
    knows its own), live cells (rows x fields that still refer to it), bytes, schema number, and whether the block is
    *suspect*: held since before its unit was lost or the controller restarted, so that the unit must confirm it."""

    __slots__ = ("_log", "_table", "_vacant", "block", "cells", "count", "nbytes", "schema", "schemas", "start",
                 "suspect", "unit")  # fmt: skip

    def __init__(self, log: EffectLog) -> None:
        self._log = log
        self._table = Table()
        self._table.extend(1)
        self.unit = self._table.add_column(np.int32)
        self.block = self._table.add_column(np.uint64)
        self.start = self._table.add_column(np.int64)
        self.cells = self._table.add_column(np.uint32)
        self.nbytes = self._table.add_column(np.int64)
        self.schema = self._table.add_column(np.int32)
        self.suspect = self._table.add_column(np.uint8)
        self.schemas = SchemaTable()
        self.count = 0
        self._vacant = 0  # head of the list of vacant slots, linked through ``start``

    def add(self, ref: BlockRef, start: int, cells: int, schema: PutSchema) -> int:
        """A slot for a new block."""
        slot = self._vacant
        if slot:
            self._vacant = self.start.items[slot]
        else:
            slot = self._table.extend(1)
        self.unit.items[slot] = ref.unit
        self.block.items[slot] = ref.block
        self.start.items[slot] = start
        self.cells.items[slot] = cells
        self.nbytes.items[slot] = ref.nbytes
        self.schema.items[slot] = schema.number
        self.suspect.items[slot] = 0
        self.schemas.retain(schema, 1)
        self.count += 1
        return slot

    def release(self, slots: NDArray[np.int32], fields: int) -> int:
        """Cells of these slots (one entry a row, any sign, 0 ignored) x ``fields`` died. Returns the bytes of the
        blocks that died with them."""
        slots = np.abs(slots[slots != 0])
        hit: Ints
        counts: Ints
        if not len(slots):
            return 0
        first = int(slots[0])
        if len(slots) == 1 or bool((slots == first).all()):
            left = self.cells.items[first] = self.cells.items[first] - fields * len(slots)
            return 0 if left else self._remove_one(first)
        if len(slots) * _FEW < self._table.used:
            distinct, counts = np.unique(slots, return_counts=True)
            hit = distinct.astype(np.int64)
        else:  # faster, but looks at every slot
            counts = np.bincount(slots)
            hit = np.flatnonzero(counts)
            counts = counts[hit]
        self.cells.array[hit] -= (counts * fields).astype(np.uint32)
        dead = hit[self.cells.array[hit] == 0]
        return self._remove(dead) if len(dead) else 0

    def _remove_one(self, slot: int) -> int:
        self._log.free(self.unit.items[slot], (self.block.items[slot],))
        self.schemas.release(self.schema.items[slot], 1)
        nbytes: int = self.nbytes.items[slot]
        self._vacate(slot, slot)
        self.unit.items[slot] = 0
        self.count -= 1
        self._shrink()
        return nbytes

    def _remove(self, dead: Ints) -> int:
        units = self.unit.array[dead]
        for unit in np.unique(units).tolist():
            self._log.free(unit, self.block.array[dead[units == unit]].tolist())
        numbers, counts = np.unique(self.schema.array[dead], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.schemas.release(number, count)
        nbytes = int(self.nbytes.array[dead].sum())
        self.start.array[dead[:-1]] = dead[1:]
        self._vacate(int(dead[0]), int(dead[-1]))
        self.count -= len(dead)
        self._shrink()
        return nbytes

    def _vacate(self, first: int, last: int) -> None:
        self.start.items[last] = self._vacant
        self._vacant = first

    def _shrink(self) -> None:
        if not self.count and self._table.capacity > 4096:
            self._table.reset(1)
            self._vacant = 0

    # ------------------------------------------------------------------------------------------- by storage unit

    def live_slots(self) -> Ints:
        return np.flatnonzero(self.cells.array[: self._table.used])

    def slots_of_unit(self, unit: int) -> Ints:
        live = self.cells.array[: self._table.used] > 0
        return np.flatnonzero(live & (self.unit.array[: self._table.used] == unit))

    def find(self, unit: int, blocks: list[int]) -> Ints:
        """Slots of those of ``blocks`` that are known on ``unit``."""
        slots = self.slots_of_unit(unit)
        return slots[np.isin(self.block.array[slots], np.array(blocks, np.uint64))]

    def mask(self, slots: Ints) -> NDArray[np.bool_]:
        """True at ``slots``, one entry a slot of the table."""
        mask = np.zeros(self._table.used, np.bool_)
        mask[slots] = True
        return mask

    def suspect_all(self) -> None:
        self.suspect.array[self.live_slots()] = 1

    @property
    def memory(self) -> int:
        return self._table.nbytes

    # --------------------------------------------------------------------------------------------------- snapshot

    def dump(self) -> dict[str, Any]:
        used = self._table.used
        columns = {name: getattr(self, name).array[:used].tobytes() for name in COLUMNS}
        return {"used": used, "count": self.count, "vacant": self._vacant, "schemas": self.schemas.dump(), **columns}

    def dump_slots(self, slots: Ints) -> dict[str, Any]:
        """Like `dump`, a table of these blocks alone, from slot 1 on."""
        columns = {
            name: np.concatenate((np.zeros(1, array.dtype), array[slots])).tobytes()
            for name, array in ((name, getattr(self, name).array) for name in COLUMNS)
        }
        numbers, counts = (found.tolist() for found in np.unique(self.schema.array[slots], return_counts=True))
        schemas = [[number, n, self.schemas[number].fields] for number, n in zip(numbers, counts, strict=True)]
        return {
            "used": len(slots) + 1,
            "count": len(slots),
            "vacant": 0,
            "schemas": [max(numbers, default=0), schemas],
            **columns,
        }

    def load(self, state: dict[str, Any]) -> None:
        used = state["used"]
        self._table.extend(used - self._table.used)
        for name in COLUMNS:
            array = getattr(self, name).array
            array[:used] = np.frombuffer(state[name], array.dtype)
        self.count, self._vacant = state["count"], state["vacant"]
        self.schemas.load(state["schemas"])


COLUMNS: dict[str, Any] = {
    "unit": np.int32,
    "block": np.uint64,
    "start": np.int64,
    "cells": np.uint32,
    "nbytes": np.int64,
    "schema": np.int32,
    "suspect": np.uint8,
}
"""Of a dumped table."""
