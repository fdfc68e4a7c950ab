"""Field families: fields that were always written together share one location a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from transfer_queue.control.arrays import Column, Rows, Table, as_positions, row_count
from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.commands import FamilyLocations
from transfer_queue.control.schema import FieldSchema, PutSchema, merge

if TYPE_CHECKING:
    from transfer_queue.control.subscription import Subscription

__all__ = ["Family", "FieldTable", "Layout", "Selection"]

_MAX_CACHED = 128
_MAX_NUMBERS = 128
"""Number of schemas of one answer beyond which their merged schema is not cached."""
_MISSING = np.int32(-1).tobytes()
_ZERO = np.int32(0).tobytes()


class Family:
    """``slot``: where each row's cells lie (see `BlockTable`). ``row``: their row in that block, for blocks whose rows
    are scattered over the partition; made on first use."""

    __slots__ = ("fields", "row", "slot")

    def __init__(self, fields: list[str], slot: Column, row: Column | None = None) -> None:
        self.fields = fields
        self.slot = slot
        self.row = row

    def complete(self, rows: Rows) -> bool:
        """Whether all of ``rows`` have these fields."""
        return bool((self.slot.array[rows] > 0).all())

    def locate(
        self, names: list[str], rows: Rows, base: int, blocks: BlockTable
    ) -> tuple[FamilyLocations, tuple[int, ...]]:
        """Locations of ``rows`` and the numbers of the schemas they were written under."""
        if isinstance(rows, slice) and rows.stop - rows.start == 1:
            return self._locate_one(names, rows.start, base, blocks)
        slots = self.slot.array[rows]
        n = len(slots)
        first = int(slots[0]) if n else 0
        if first > 0 and (start := blocks.start.items[first]) >= 0 and bool((slots == first).all()):
            if isinstance(rows, slice):
                in_block = np.arange(rows.start + base - start, rows.stop + base - start, dtype=np.int32)
            else:
                in_block = (rows + (base - start)).astype(np.int32)
            found = FamilyLocations(
                names, [blocks.unit.items[first]], [blocks.block.items[first]], bytes(4 * n), in_block.tobytes()
            )
            return found, (blocks.schema.items[first],)
        return self._locate_many(names, rows, base, blocks)

    def _locate_one(
        self, names: list[str], position: int, base: int, blocks: BlockTable
    ) -> tuple[FamilyLocations, tuple[int, ...]]:
        slot = self.slot.items[position]
        if slot <= 0:
            return FamilyLocations(names, [], [], _MISSING, _ZERO), ()
        start = blocks.start.items[slot]
        if start >= 0:
            row = position + base - start
        else:
            assert self.row is not None
            row = self.row.items[position]
        found = FamilyLocations(
            names, [blocks.unit.items[slot]], [blocks.block.items[slot]], _ZERO, row.to_bytes(4, "little")
        )
        return found, (blocks.schema.items[slot],)

    def _locate_many(
        self, names: list[str], rows: Rows, base: int, blocks: BlockTable
    ) -> tuple[FamilyLocations, tuple[int, ...]]:
        slots, block_of_row = np.unique(self.slot.array[rows], return_inverse=True)
        absent = int(np.searchsorted(slots, 1))  # slots of unwritten and lost cells
        starts = blocks.start.array[slots.clip(0)]
        in_block = as_positions(rows) + base - starts[block_of_row]
        if self.row is not None:
            in_block = np.where(starts[block_of_row] < 0, self.row.array[rows], in_block)
        if absent:
            in_block[block_of_row < absent] = 0
            block_of_row = np.maximum(block_of_row - absent, -1)
            slots = slots[absent:]
        found = FamilyLocations(
            names,
            blocks.unit.array[slots].tolist(),
            blocks.block.array[slots].tolist(),
            block_of_row.astype(np.int32).tobytes(),
            in_block.astype(np.int32).tobytes(),
        )
        return found, tuple(np.unique(blocks.schema.array[slots]).tolist())


class Selection:
    """Some fields of a partition, sorted into their families. ``unknown``: names that were never written."""

    __slots__ = ("_merged", "families", "names", "parts", "unknown")

    def __init__(self, names: Sequence[str], parts: list[tuple[Family, list[str]]], unknown: list[str]) -> None:
        self.names = names
        self.parts = parts
        self.families = [family for family, _ in parts]
        self.unknown = unknown
        self._merged: dict[tuple[tuple[int, ...], ...], list[FieldSchema]] = {}

    def complete(self, rows: Rows) -> bool:
        return not self.unknown and all(family.complete(rows) for family in self.families)

    def locate(self, rows: Rows, base: int, blocks: BlockTable) -> tuple[list[FamilyLocations], list[FieldSchema]]:
        """Locations, and the schemas in the order of ``names``; a field that none of ``rows`` has gets no schema."""
        locations = []
        written: list[tuple[int, ...]] = []
        for family, names in self.parts:
            found, numbers = family.locate(names, rows, base, blocks)
            locations.append(found)
            written.append(numbers)
        key = tuple(written)
        schemas = self._merged.get(key)
        if schemas is None:
            schemas = self._merge(key, blocks)
            if sum(map(len, key)) <= _MAX_NUMBERS:
                if len(self._merged) >= _MAX_CACHED:
                    self._merged.clear()
                self._merged[key] = schemas
        return locations, schemas

    def _merge(self, written: tuple[tuple[int, ...], ...], blocks: BlockTable) -> list[FieldSchema]:
        merged = {
            name: merge([blocks.schemas[number].by_name[name] for number in numbers])
            for (_, names), numbers in zip(self.parts, written, strict=True)
            for name in names
            if numbers
        }
        return [merged[name] for name in self.names if name in merged]


class Layout:
    """Everything a put with a given list of fields needs to know about the partition, worked out once.

    ``subscriptions``: those that want one of the fields, each with the families it wants besides.
    """

    __slots__ = ("families", "schema", "subscriptions")

    def __init__(
        self, schema: PutSchema, families: list[Family], subscriptions: list[tuple[Subscription, list[Family]]]
    ) -> None:
        self.schema = schema
        self.families = families
        self.subscriptions = subscriptions


class FieldTable:
    """The fields of one partition and their families. ``family_of`` is in field-creation order."""

    __slots__ = ("_selections", "_table", "families", "family_of", "lengths", "sorted_names")

    def __init__(self, table: Table) -> None:
        self._table = table
        self.families: list[Family] = []
        self.family_of: dict[str, Family] = {}
        self.sorted_names: list[str] = []
        self.lengths: dict[str, Column] = {}
        """ragged field -> elements along its first ragged axis, plus one; 0: not known."""
        self._selections: dict[tuple[str, ...], Selection] = {}

    def arrange(self, names: Iterable[str]) -> tuple[list[Family], bool]:
        """Families that make up exactly ``names``, and whether anything had to change: families that hold other
        fields too are split, new fields become a family."""
        changed = False
        families: list[Family] = []
        wanted = dict.fromkeys(names)
        for family in list(self.families):
            inside = [name for name in family.fields if name in wanted]
            if inside and len(inside) < len(family.fields):
                family = self._split(family, inside)
                changed = True
            if inside:
                families.append(family)
        fresh = [name for name in wanted if name not in self.family_of]
        if fresh:
            families.append(self._add(Family(fresh, self._table.add_column(np.int32))))
            self.sorted_names = sorted(self.family_of)
            changed = True
        if changed:
            self._selections.clear()
        return families, changed

    def adopt(self, families: list[Family], names: list[str]) -> None:
        """Take over families, with the field-creation order ``names``."""
        for family in families:
            self._add(family)
        self.family_of = {name: self.family_of[name] for name in names}
        self.sorted_names = sorted(names)

    def _add(self, family: Family) -> Family:
        self.families.append(family)
        self.family_of.update(dict.fromkeys(family.fields, family))
        return family

    def _split(self, family: Family, inside: list[str]) -> Family:
        family.fields = [name for name in family.fields if name not in inside]
        row = None if family.row is None else self._table.copy_column(family.row)
        return self._add(Family(inside, self._table.copy_column(family.slot), row))

    def select(self, names: tuple[str, ...]) -> Selection:
        selection = self._selections.get(names)
        if selection is None:
            if len(self._selections) >= _MAX_CACHED:
                self._selections.clear()
            parts: dict[int, tuple[Family, list[str]]] = {}
            for name in dict.fromkeys(names):
                if family := self.family_of.get(name):
                    parts.setdefault(id(family), (family, []))[1].append(name)
            unknown = [name for name in dict.fromkeys(names) if name not in self.family_of]
            selection = self._selections[names] = Selection(tuple(dict.fromkeys(names)), list(parts.values()), unknown)
        return selection

    def complete_names(self, rows: Rows) -> list[str]:
        """Sorted names of the fields that all of ``rows`` have."""
        if not row_count(rows):
            return []
        ready = [family for family in self.families if family.complete(rows)]
        if len(ready) == len(self.families):
            return self.sorted_names
        return sorted(name for family in ready for name in family.fields)

    def row_column(self, family: Family) -> Column:
        """The family's ``row`` column, made if need be."""
        if family.row is None:
            family.row = self._table.add_column(np.int32)
        return family.row

    def write_lengths(self, names: Iterable[str], lengths: dict[str, bytes], rows: Rows, fresh: bool) -> None:
        for name, raw in lengths.items():
            column = self.lengths.get(name)
            if column is None:
                column = self.lengths[name] = self._table.add_column(np.int32)
            column.array[rows] = np.frombuffer(raw, np.int32) + 1
        if not fresh:
            for name in names:
                if name in self.lengths and name not in lengths:
                    self.lengths[name].array[rows] = 0

    def read_lengths(self, names: Iterable[str], rows: Rows) -> dict[str, bytes]:
        """Lengths of those fields for which all of ``rows`` have one."""
        found = {}
        for name in names:
            if name in self.lengths:
                lengths = self.lengths[name].array[rows] - 1
                if len(lengths) and int(lengths.min()) >= 0:
                    found[name] = lengths.tobytes()
        return found
