"""What the control plane knows of a column: its name, kind, dtype and row shape. No data."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["FieldSchema", "Kind"]

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
