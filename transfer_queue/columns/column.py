"""Rows of one field as raw buffers: the unit that blocks are made of. numpy only.

Row sizes are stored as lengths, never as offsets, so that a slice of rows is a slice of every buffer and a
concatenation of columns is the concatenation of their buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import CorruptBlockError, InvalidInputError

__all__ = [
    "ITEM_BYTES",
    "Bytes",
    "Chunk",
    "ColumnView",
    "DeviceBytes",
    "Int64s",
    "Rows",
    "as_bytes",
    "concatenate_columns",
]

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch dtype name. Types packed below one byte and quantised types are not stored."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int64s: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = "tuple[int, int] | Int64s | None"
"""Selection of rows: ``(start, stop)``, positions in any order, with repeats, or None for all rows."""


class DeviceBytes(Protocol):
    """Bytes in the memory of a GPU: they go straight to where they are stored."""

    @property
    def nbytes(self) -> int: ...

    @property
    def data(self) -> memoryview:
        """A copy in the memory of this host."""

    def __getitem__(self, part: slice) -> DeviceBytes: ...

    def copy_into(self, target: Bytes) -> None: ...


Chunk: TypeAlias = "Bytes | DeviceBytes"

TEXT_TYPES = ("str", "numpy.str_")
MAX_BYTES = 1 << 62
GATHER_BELOW = 4096
"""Picked runs of rows of fewer bytes than this (on average) are gathered into one buffer; larger ones stay where they
are and become one segment each."""


class ColumnView:
    """``rows`` rows of one field, as buffers that are referenced, not copied.

    ``chunks``: uint8 arrays, or bytes on a GPU, whose concatenation holds the rows one after the other: the elements in
    row-major order (for a single ragged axis that is not the first one: with that axis moved to the front), UTF-8 text,
    or documents. ``extents``: int64; ragged: ``(rows, ragged axes)`` the size of each row along its ragged axes; text
    and object: ``(rows,)`` bytes of each row, -1 for a text row that is None; dense: None.
    """

    __slots__ = ("_starts", "_values", "chunks", "extents", "rows", "schema")

    def __init__(self, schema: FieldSchema, rows: int, chunks: Sequence[Chunk], extents: Int64s | None) -> None:
        self.schema = schema
        self.rows = rows
        self.chunks = chunks
        self.extents = extents
        self._starts: Int64s | None = None
        only = chunks[0] if len(chunks) == 1 else None
        self._values: Bytes | None = only if isinstance(only, np.ndarray) else None

    @property
    def value_bytes(self) -> int:
        """Bytes of all chunks together."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def values(self) -> Bytes:
        """All rows in one uint8 array; copies only if they lie in several chunks."""
        if self._values is None:
            chunks = [chunk if isinstance(chunk, np.ndarray) else as_bytes(chunk.data) for chunk in self.chunks]
            self._values = np.concatenate(chunks) if chunks else np.empty(0, np.uint8)
        return self._values

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a dense or ragged column; 1 for text and objects."""
        return ITEM_BYTES[self.schema.dtype] if self.schema.kind in ("dense", "ragged") else 1

    @property
    def row_bytes(self) -> int:
        """Dense columns: bytes of a row. Ragged columns: bytes of a row whose ragged axes all have size 1."""
        return fixed_elements(self.schema) * self.item_bytes

    @property
    def starts(self) -> Int64s:
        """int64 ``(rows + 1,)``: where each row starts in ``values``, in bytes; the last entry is their end.

        Raises CorruptBlockError if the row sizes do not add up to the bytes that are there.
        """
        if self._starts is None:
            self._starts = self._checked_starts()
        return self._starts

    def _checked_starts(self) -> Int64s:
        starts = np.zeros(self.rows + 1, np.int64)
        sizes = self.row_sizes
        available = self.value_bytes
        if self.rows and int(sizes.max()) > available:
            raise self._corrupt(f"a row of {int(sizes.max())} bytes in a buffer of {available}")
        np.cumsum(sizes, out=starts[1:])
        if int(starts[-1]) != available:
            raise self._corrupt(f"rows of {int(starts[-1])} bytes together in a buffer of {available}")
        return starts

    @property
    def row_sizes(self) -> Int64s:
        """int64 ``(rows,)``: bytes of each row, from its extents.

        Raises CorruptBlockError for negative sizes and for sizes of more than 2**62 bytes.
        """
        if self.extents is None:
            return np.full(self.rows, self.row_bytes, np.int64)
        if not self.rows:
            return np.empty(0, np.int64)
        lowest = int(self.extents.min()) if self.extents.size else 0
        if self.schema.kind in ("text", "object"):
            if lowest < (-1 if self.schema.kind == "text" else 0):
                raise self._corrupt(f"a row length of {lowest}")
            return np.maximum(self.extents, 0)
        if lowest < 0:
            raise self._corrupt(f"a row size of {lowest}")
        largest = float(np.maximum(self.extents, 1).astype(np.float64).prod(axis=1).max())
        if largest * max(self.row_bytes, 1) > MAX_BYTES:
            raise self._corrupt("a row larger than 2**62 bytes")
        return cast(Int64s, self.extents.prod(axis=1) * self.row_bytes)

    def _corrupt(self, what: str) -> CorruptBlockError:
        return CorruptBlockError(f"column {self.schema.name!r} is damaged: {what}")

    def buffers(self) -> list[Sequence[Chunk]]:
        """The column's buffers in stored order, each as its chunks."""
        if self.extents is None:
            return [self.chunks]
        return [self.chunks, [as_bytes(self.extents)]]

    def take(self, rows: Rows) -> ColumnView:
        """The picked rows; without copying where they are contiguous or long.

        Raises InvalidInputError for rows outside the column.
        """
        if rows is None:
            return self
        if isinstance(rows, tuple):
            start, stop = rows
            if not 0 <= start <= stop <= self.rows:
                raise InvalidInputError(f"rows {start}:{stop} are outside the block, which has {self.rows}")
            return self._slice(start, stop)
        index = np.asarray(rows)
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise InvalidInputError(f"rows must be a 1-D integer array, not {index.dtype} of shape {index.shape}")
        if not len(index):
            return self._slice(0, 0)
        if int(index.min()) < 0 or int(index.max()) >= self.rows:
            raise InvalidInputError(
                f"rows {int(index.min())} to {int(index.max())} are outside the block, which has {self.rows}"
            )
        return self._pick(index.astype(np.int64, copy=False))

    def _slice(self, start: int, stop: int) -> ColumnView:
        if start == 0 and stop == self.rows:
            return self
        if self.extents is None:
            low, high = start * self.row_bytes, stop * self.row_bytes
            return ColumnView(self.schema, stop - start, _cut(self.chunks, low, high), None)
        low, high = int(self.starts[start]), int(self.starts[stop])
        return ColumnView(self.schema, stop - start, _cut(self.chunks, low, high), self.extents[start:stop])

    def _pick(self, index: Int64s) -> ColumnView:
        breaks = np.flatnonzero(np.diff(index) != 1) + 1
        firsts = np.concatenate(([0], breaks))
        lasts = np.concatenate((breaks, [len(index)])) - 1
        if len(firsts) == 1:
            return self._slice(int(index[0]), int(index[-1]) + 1)
        extents = None if self.extents is None else self.extents[index]
        values = self.values
        if self.extents is None and self.row_bytes * len(index) < GATHER_BELOW * len(firsts):
            gathered = np.take(values.reshape(self.rows, self.row_bytes), index, axis=0).reshape(-1)
            return ColumnView(self.schema, len(index), [gathered], extents)
        starts = self.starts
        lows, highs = starts[index[firsts]].tolist(), starts[index[lasts] + 1].tolist()
        chunks = [values[low:high] for low, high in zip(lows, highs, strict=True)]
        if sum(highs) - sum(lows) < GATHER_BELOW * len(chunks):
            chunks = [np.concatenate(chunks)]
        return ColumnView(self.schema, len(index), chunks, extents)


def fixed_elements(schema: FieldSchema) -> int:
    """Product of the sizes of the axes that are not ragged; 1 for text and objects."""
    return math.prod(size for size in schema.shape or () if size is not None)


def as_bytes(source: memoryview | bytes | bytearray | npt.NDArray[np.generic]) -> Bytes:
    """A flat uint8 view of a buffer; copies only an array that is not contiguous."""
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    return np.frombuffer(source, np.uint8)


def _cut(chunks: Sequence[Chunk], low: int, high: int) -> list[Chunk]:
    """Bytes ``low:high`` of the concatenation of ``chunks``, as slices of them."""
    if len(chunks) == 1:
        return [chunks[0][low:high]]
    cut: list[Chunk] = []
    position = 0
    for chunk in chunks:
        size = chunk.nbytes
        if position < high and low < position + size:
            cut.append(chunk[max(low - position, 0) : high - position])
        position += size
    return cut


def concatenate_columns(columns: Sequence[ColumnView]) -> ColumnView:
    """The rows of all ``columns`` one after the other. They must agree on kind, dtype and shape.

    Raises InvalidInputError naming the field where they differ.
    """
    first = columns[0]
    if any(column.schema != first.schema for column in columns):
        found = sorted({repr(column.schema) for column in columns})
        raise InvalidInputError(f"field {first.schema.name!r} cannot be concatenated: {' against '.join(found)}")
    chunks = [chunk for column in columns for chunk in column.chunks]
    extents = None if first.extents is None else np.concatenate(_extents(columns))
    return ColumnView(first.schema, sum(column.rows for column in columns), chunks, extents)


def _extents(columns: Iterable[ColumnView]) -> list[Int64s]:
    return [column.extents for column in columns if column.extents is not None]
