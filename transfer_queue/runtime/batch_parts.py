"""Long replies in msgpack, put together from replies for some of their rows each."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.control.commands import Batch, ColumnGroupLocations, StatusArrays
from transfer_queue.control.schema import FieldSchema, merge
from transfer_queue.wire.messages import ENCODER

__all__ = ["BatchParts", "RegroupedError", "joined_status", "msgpack_head", "without_head"]


class RegroupedError(Exception):
    """The fields were arranged in other column groups since the first part."""


class BatchParts:
    """Add the parts in order, then take `encoded`."""

    def __init__(self) -> None:
        self._rows = 0
        self._indexes: list[bytes] = []
        self._status: list[bytes] = []
        self._tags = _Optional(ENCODER.encode({}))
        self._keys = _Optional(ENCODER.encode(None))
        self._schemas: dict[str, list[FieldSchema]] = {}
        self._families: list[_Family] | None = None
        self._lengths: dict[str, list[bytes]] | None = None

    def add(self, batch: Batch) -> None:
        """Raises RegroupedError."""
        rows = len(batch.indexes) // 8
        if not rows:
            return
        if self._families is None:
            self._families = [_Family(found.fields) for found in batch.locations]
        if [found.fields for found in batch.locations] != [family.fields for family in self._families]:
            raise RegroupedError
        for family, found in zip(self._families, batch.locations, strict=True):
            family.add(found)
        for schema in batch.fields:
            known = self._schemas.setdefault(schema.name, [])
            if schema not in known:
                known.append(schema)
        self._indexes.append(batch.indexes)
        self._status.append(batch.status)
        self._tags.add(batch.tags or None, rows, self._rows)
        self._keys.add(batch.keys, rows, self._rows)
        if self._lengths is None:
            self._lengths = {name: [] for name in batch.lengths}
        for name in [name for name in self._lengths if name not in batch.lengths]:
            del self._lengths[name]  # not known of all rows
        for name, known_lengths in self._lengths.items():
            known_lengths.append(batch.lengths[name])
        self._rows += rows

    def encoded(self, names: list[str] | None) -> list[bytes]:
        """The whole Batch, as `ENCODER` would encode it. ``names``: the asked fields; None: any."""
        found = self._schemas if names is None else [name for name in dict.fromkeys(names) if name in self._schemas]
        entries: dict[str, list[bytes]] = {
            "type": [ENCODER.encode(Batch.__name__)],
            "indexes": _binary(self._indexes),
            "fields": [ENCODER.encode([merge(self._schemas[name]) for name in found])],
            "status": _binary(self._status),
            "tags": self._tags.encoded(self._rows) or [msgpack_head(0, 0x90)],
            "keys": self._keys.encoded(self._rows) or [ENCODER.encode(None)],
            "locations": [msgpack_head(len(self._families or ()), 0x90)],
            "lengths": [msgpack_head(len(self._lengths or ()), 0x80)],
        }
        for family in self._families or ():
            entries["locations"] += family.encoded()
        for name, parts in (self._lengths or {}).items():
            entries["lengths"] += [ENCODER.encode(name), *_binary(parts)]
        return _map(entries)


class _Optional:
    """A list with an item a row, which is empty if no row has one."""

    def __init__(self, nothing: bytes) -> None:
        self._nothing = nothing
        self._parts: list[bytes] = []

    def add(self, items: list[Any] | None, rows: int, before: int) -> None:
        if items is not None:
            if not self._parts:
                self._parts.append(self._nothing * before)
            self._parts.append(without_head(items))
        elif self._parts:
            self._parts.append(self._nothing * rows)

    def encoded(self, rows: int) -> list[bytes]:
        return [msgpack_head(rows, 0x90), *self._parts] if self._parts else []


class _Family:
    """The locations of some fields. Blocks are numbered in the order in which they come."""

    def __init__(self, fields: list[str]) -> None:
        self.fields = fields
        self._number: dict[tuple[int, int], int] = {}
        self._units: list[bytes] = []
        self._blocks: list[bytes] = []
        self._block_of_row: list[bytes] = []
        self._row_in_block: list[bytes] = []

    def add(self, found: ColumnGroupLocations) -> None:
        known = len(self._number)
        places = list(zip(found.units, found.blocks, strict=True))
        numbers = [self._number.setdefault(place, len(self._number)) for place in places]
        fresh = [place for place, number in zip(places, numbers, strict=True) if number >= known]
        self._units.append(without_head([unit for unit, _ in fresh]))
        self._blocks.append(without_head([block for _, block in fresh]))
        absent = -1  # the last entry, which row -1 of a part finds
        table = np.array([*numbers, absent], np.int32)
        self._block_of_row.append(table[np.frombuffer(found.block_of_row, np.int32)].tobytes())
        self._row_in_block.append(found.row_in_block)

    def encoded(self) -> list[bytes]:
        blocks = msgpack_head(len(self._number), 0x90)
        return [
            msgpack_head(5, 0x90),
            ENCODER.encode(self.fields),
            *(blocks, *self._units),
            *(blocks, *self._blocks),
            *_binary(self._block_of_row),
            *_binary(self._row_in_block),
        ]


def joined_status(parts: list[StatusArrays]) -> list[bytes]:
    """The arrays of all rows as one reply, as `ENCODER` would encode it."""
    if not parts:
        return [ENCODER.encode(StatusArrays())]
    return _map(
        {
            "type": [ENCODER.encode(StatusArrays.__name__)],
            "indexes": _binary([part.indexes or b"" for part in parts]),
            "status": _binary([part.status for part in parts]),
            "columns": [ENCODER.encode(parts[0].columns)],
        }
    )


def _map(entries: dict[str, list[bytes]]) -> list[bytes]:
    whole = [msgpack_head(len(entries), 0x80)]
    for name, parts in entries.items():
        whole += [ENCODER.encode(name), *parts]
    return whole


def _binary(parts: list[bytes]) -> list[bytes]:
    return [b"\xc6" + sum(map(len, parts)).to_bytes(4, "big"), *parts]


def msgpack_head(count: int, small: int) -> bytes:
    """The msgpack header of a map (``small`` 0x80) or a list (0x90)."""
    if count < 16:
        return bytes([small + count])
    if count < 1 << 16:
        return bytes([0xDE if small == 0x80 else 0xDC]) + count.to_bytes(2, "big")
    return bytes([0xDF if small == 0x80 else 0xDD]) + count.to_bytes(4, "big")


def without_head(items: Any) -> bytes:
    """A map or list in msgpack, without its header."""
    count = len(items)
    return ENCODER.encode(items)[1 if count < 16 else 3 if count < 1 << 16 else 5 :]
