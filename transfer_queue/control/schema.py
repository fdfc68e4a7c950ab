"""What the control plane knows of a column: its name, kind, dtype and row shape. No data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

__all__ = ["FieldSchema", "Kind", "PutSchema", "SchemaTable", "merge", "schema_key"]

Kind = Literal["dense", "ragged", "text", "object"]
"""dense: all rows of one shape; ragged: rows of one dtype and rank whose shapes differ; text: str or None rows;
object: anything else, one msgpack or pickle document a row."""


class FieldSchema(msgspec.Struct, frozen=True, array_like=True):
    """One field of a put.

    ``dtype`` is a torch dtype name without prefix (``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``) for dense and
    ragged columns, ``"str"`` for text, ``"object"`` for objects. ``shape`` is the shape of one row: ``()`` for a 1-D
    column, ``None`` entries for ragged axes, ``None`` as a whole for text and object columns.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int | None, ...] | None = None


def merge(schemas: Sequence[FieldSchema]) -> FieldSchema:
    """One schema for rows written under several: what is true of all of them.

    Differing shapes of one dtype and rank are ragged; anything further apart is told apart row by row only.
    """
    first = schemas[0]
    if all(schema == first for schema in schemas):
        return first
    tensors = all(schema.kind in ("dense", "ragged") for schema in schemas)
    ranks = {len(schema.shape) for schema in schemas if schema.shape is not None}
    if tensors and len(ranks) == 1 and all(schema.dtype == first.dtype for schema in schemas):
        shapes = [schema.shape for schema in schemas if schema.shape is not None]
        shape = tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))
        ragged = None in shape or any(schema.kind == "ragged" for schema in schemas)
        return FieldSchema(first.name, "ragged" if ragged else "dense", first.dtype, shape)
    return FieldSchema(first.name, "object", "object", None)


schema_key = msgspec.msgpack.Encoder().encode
"""A list of fields -> bytes that are the same for equal fields in the same order."""


class PutSchema:
    """The fields of one put, shared by all blocks with equal fields. ``blocks`` counts the live blocks. ``key``: see
    `schema_key`."""

    __slots__ = ("blocks", "by_name", "fields", "key", "number", "sorted_names")

    def __init__(self, number: int, fields: Sequence[FieldSchema], key: bytes) -> None:
        self.number = number
        self.fields = list(fields)
        self.key = key
        self.by_name = {field.name: field for field in fields}
        self.sorted_names = sorted(self.by_name)
        self.blocks = 0


class SchemaTable:
    """Put schemas by number; one lives as long as blocks use it, numbers are not reused."""

    __slots__ = ("_by_key", "_last", "_live")

    def __init__(self) -> None:
        self._live: dict[int, PutSchema] = {}
        self._by_key: dict[bytes, PutSchema] = {}
        self._last = 0

    def share(self, fields: Sequence[FieldSchema], key: bytes) -> PutSchema:
        """The schema that blocks of these fields already use, or a new one."""
        schema = self._by_key.get(key)
        if schema is None:
            self._last += 1
            schema = PutSchema(self._last, fields, key)
        return schema

    def __getitem__(self, number: int) -> PutSchema:
        return self._live[number]

    def __len__(self) -> int:
        return len(self._live)

    def retain(self, schema: PutSchema, blocks: int) -> None:
        if not schema.blocks:
            self._live[schema.number] = schema
            self._by_key.setdefault(schema.key, schema)
        schema.blocks += blocks

    def release(self, number: int, blocks: int) -> None:
        schema = self._live[number]
        schema.blocks -= blocks
        if not schema.blocks:
            del self._live[number]
            if self._by_key.get(schema.key) is schema:  # an older snapshot may have two schemas with one key
                del self._by_key[schema.key]

    def dump(self) -> list[Any]:
        return [self._last, [[schema.number, schema.blocks, schema.fields] for schema in self._live.values()]]

    def load(self, state: list[Any]) -> None:
        self._last, live = state
        for number, blocks, fields in live:
            known = msgspec.convert(fields, list[FieldSchema])
            self.retain(PutSchema(number, known, schema_key(known)), blocks)
