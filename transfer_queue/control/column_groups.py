"""Column groups: fields that were always written together share one location a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from transfer_queue.control.arrays import Column, Rows, Table, as_positions, row_count
from transfer_queue.control.blocks import BlockTable
from transfer_queue.control.commands import ColumnGroupLocations
from transfer_queue.control.schema import FieldSchema, merge

__all__ = ["ColumnGroup", "FieldTable", "Selection"]

_MAX_CACHED = 128
_MAX_NUMBERS = 128
"""Number of schemas of one answer beyond which their merged schema is not cached."""
_MISSING = np.int32(-1).tobytes()
_ZERO = np.int32(0).tobytes()


class ColumnGroup:
    """``slot``: where each row's cells lie (see `BlockTable`). ``row``: their row in that block, for blocks whose rows
    are scattered over the partition; made on first use."""

    __slots__ = ("fields", "row", "slot")

    def __init__(self, fields: list[str], slot: Column, row: Column | None = None) -> None:
        self.fields = fields
        self.slot = slot
        self.row = row

    def complete(self, rows: Rows) -> bool:
        """Return whether all of ``rows`` have these fields."""
        return bool((self.slot.array[rows] > 0).all())

    def locate(
        self, names: list[str], rows: Rows, base: int, blocks: BlockTable
    ) -> tuple[ColumnGroupLocations, tuple[int, ...]]:
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
            found = ColumnGroupLocations(
                names, [blocks.unit.items[first]], [blocks.block.items[first]], bytes(4 * n), in_block.tobytes()
            )
            return found, (blocks.schema.items[first],)
        return self._locate_many(names, rows, base, blocks)

    def _locate_one(
        self, names: list[str], position: int, base: int, blocks: BlockTable
    ) -> tuple[ColumnGroupLocations, tuple[int, ...]]:
        slot = self.slot.items[position]
        if slot <= 0:
            return ColumnGroupLocations(names, [], [], _MISSING, _ZERO), ()
        start = blocks.start.items[slot]
        if start >= 0:
            row = position + base - start
        else:
            assert self.row is not None
            row = self.row.items[position]
        found = ColumnGroupLocations(
            names, [blocks.unit.items[slot]], [blocks.block.items[slot]], _ZERO, row.to_bytes(4, "little")
        )
        return found, (blocks.schema.items[slot],)

    def _locate_many(
        self, names: list[str], rows: Rows, base: int, blocks: BlockTable
    ) -> tuple[ColumnGroupLocations, tuple[int, ...]]:
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
        found = ColumnGroupLocations(
            names,
            blocks.unit.array[slots].tolist(),
            blocks.block.array[slots].tolist(),
            block_of_row.astype(np.int32).tobytes(),
            in_block.astype(np.int32).tobytes(),
        )
        return found, tuple(np.unique(blocks.schema.array[slots]).tolist())


class Selection:
    """Some fields of a partition, sorted into their column groups. ``unknown``: names that were never written."""

    __slots__ = ("_merged", "column_groups", "names", "parts", "unknown")

    def __init__(self, names: Sequence[str], parts: list[tuple[ColumnGroup, list[str]]], unknown: list[str]) -> None:
        self.names = names
        self.parts = parts
        self.column_groups = [column_group for column_group, _ in parts]
        self.unknown = unknown
        self._merged: dict[tuple[tuple[int, ...], ...], list[FieldSchema]] = {}

    def complete(self, rows: Rows) -> bool:
        return not self.unknown and all(column_group.complete(rows) for column_group in self.column_groups)

    def locate(self, rows: Rows, base: int, blocks: BlockTable) -> tuple[list[ColumnGroupLocations], list[FieldSchema]]:
        """Locations, and the schemas in the order of ``names``; a field that none of ``rows`` has gets no schema."""
        locations = []
        written: list[tuple[int, ...]] = []
        for column_group, names in self.parts:
            found, numbers = column_group.locate(names, rows, base, blocks)
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


class FieldTable:
    """The fields of one partition and their column groups. ``column_group_of`` is in field-creation order."""

    __slots__ = ("_selections", "_table", "column_group_of", "column_groups", "lengths", "sorted_names")

    def __init__(self, table: Table) -> None:
        self._table = table
        self.column_groups: list[ColumnGroup] = []
        self.column_group_of: dict[str, ColumnGroup] = {}
        self.sorted_names: list[str] = []
        self.lengths: dict[str, Column] = {}
        """ragged field -> elements along its first ragged axis, plus one; 0: not known."""
        self._selections: dict[tuple[str, ...], Selection] = {}

    def arrange(self, names: Iterable[str]) -> tuple[list[ColumnGroup], bool]:
        """Return the column groups that make up exactly ``names``, and whether anything had to change.

        Groups that hold other fields too are split, and new fields become a group.
        """
        changed = False
        column_groups: list[ColumnGroup] = []
        wanted = dict.fromkeys(names)
        for column_group in list(self.column_groups):
            inside = [name for name in column_group.fields if name in wanted]
            if inside and len(inside) < len(column_group.fields):
                column_group = self._split(column_group, inside)
                changed = True
            if inside:
                column_groups.append(column_group)
        fresh = [name for name in wanted if name not in self.column_group_of]
        if fresh:
            column_groups.append(self._add(ColumnGroup(fresh, self._table.add_column(np.int32))))
            self.sorted_names = sorted(self.column_group_of)
            changed = True
        if changed:
            self._selections.clear()
        return column_groups, changed

    def adopt(self, column_groups: list[ColumnGroup], names: list[str]) -> None:
        """Take over column groups, with the field-creation order ``names``."""
        for column_group in column_groups:
            self._add(column_group)
        self.column_group_of = {name: self.column_group_of[name] for name in names}
        self.sorted_names = sorted(names)

    def _add(self, column_group: ColumnGroup) -> ColumnGroup:
        self.column_groups.append(column_group)
        self.column_group_of.update(dict.fromkeys(column_group.fields, column_group))
        return column_group

    def _split(self, column_group: ColumnGroup, inside: list[str]) -> ColumnGroup:
        column_group.fields = [name for name in column_group.fields if name not in inside]
        row = None if column_group.row is None else self._table.copy_column(column_group.row)
        return self._add(ColumnGroup(inside, self._table.copy_column(column_group.slot), row))

    def select(self, names: tuple[str, ...]) -> Selection:
        selection = self._selections.get(names)
        if selection is None:
            if len(self._selections) >= _MAX_CACHED:
                self._selections.clear()
            parts: dict[int, tuple[ColumnGroup, list[str]]] = {}
            for name in dict.fromkeys(names):
                if column_group := self.column_group_of.get(name):
                    parts.setdefault(id(column_group), (column_group, []))[1].append(name)
            unknown = [name for name in dict.fromkeys(names) if name not in self.column_group_of]
            selection = self._selections[names] = Selection(tuple(dict.fromkeys(names)), list(parts.values()), unknown)
        return selection

    def complete_names(self, rows: Rows) -> list[str]:
        """Sorted names of the fields that all of ``rows`` have."""
        if not row_count(rows):
            return []
        ready = [column_group for column_group in self.column_groups if column_group.complete(rows)]
        if len(ready) == len(self.column_groups):
            return self.sorted_names
        return sorted(name for column_group in ready for name in column_group.fields)

    def row_column(self, column_group: ColumnGroup) -> Column:
        """The column group's ``row`` column, made if need be."""
        if column_group.row is None:
            column_group.row = self._table.add_column(np.int32)
        return column_group.row

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
