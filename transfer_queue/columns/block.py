"""Blocks: some rows x some fields of one put, as bytes that describe themselves. numpy only.

::

    offset 0   magic "TQB1"
           4   u32  bytes of the header
           8   header, msgpack: [rows, bytes of data, [[name, kind, dtype, shape, [[offset, nbytes], ...]], ...]]
           D   data; D is 8 + header bytes rounded up to 64

Numbers are little-endian. Buffers start at multiples of 64 bytes and their offsets count from D, so that a header's own
length does not enter into it. The data is padded to a multiple of 64, so blocks can follow each other. Buffers of a
column: the values and, unless it is dense, the extents of its rows (see ``column.ColumnView``).

Everything read from bytes is checked against the buffer it came from; nothing is allocated by a size that a header
claims. Sizes and offsets are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np

from transfer_queue.columns.column import (
    ITEM_BYTES,
    MAX_BYTES,
    TEXT_TYPES,
    Bytes,
    Chunk,
    ColumnView,
    Int64s,
    Rows,
    as_bytes,
    concatenate_columns,
    fixed_elements,
)
from transfer_queue.columns.copying import copy_bytes
from transfer_queue.control.schema import FieldSchema, Kind
from transfer_queue.errors import CorruptBlockError, InvalidInputError, StorageKeyNotFoundError

__all__ = ["ALIGN", "MOST_HEAD_BYTES", "BlockView", "ColumnView", "EncodedBlock", "concatenate"]

ALIGN: Final = 64
MAGIC: Final = b"TQB1"
PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 16 << 20
MOST_HEAD_BYTES: Final = MAX_HEADER_BYTES + ALIGN
"""Of a block: its header with what precedes and follows it."""
SEGMENT_BYTES: Final = 4096
"""Neighbouring pieces smaller than this are joined into one segment."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Column(msgspec.Struct, array_like=True, frozen=True):
    name: str
    kind: Kind
    dtype: str
    shape: tuple[_Count | None, ...] | None
    buffers: list[tuple[_Count, _Count]]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    rows: _Count
    data_bytes: _Count
    columns: list[_Column]


_Found = TypeVar("_Found")

_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class EncodedBlock:
    """A block to be written. It refers to the buffers of its columns and copies nothing until written.

    The sources must stay unchanged until then.
    """

    __slots__ = ("_columns", "_head", "_layout", "nbytes", "rows")

    def __init__(self, rows: int, columns: Iterable[ColumnView]) -> None:
        self.rows = rows
        self._columns = {column.schema.name: column for column in columns}
        self._layout: list[tuple[int, Sequence[Chunk]]] = []
        described = []
        end = 0
        for column in self._columns.values():
            places = []
            for chunks in column.buffers():
                size = sum(chunk.nbytes for chunk in chunks)
                self._layout.append((end, chunks))
                places.append((end, size))
                end = _aligned(end + size)
            schema = column.schema
            described.append(_Column(schema.name, schema.kind, schema.dtype, schema.shape, places))
        header = _encode_header(_Header(rows, end, described))
        if len(header) > MAX_HEADER_BYTES:
            raise InvalidInputError(f"too many fields: {len(self._columns)} need a header of {len(header)} bytes")
        head = MAGIC + len(header).to_bytes(4, "little") + header
        self._head = head.ljust(_aligned(len(head)), b"\0")
        self.nbytes = len(self._head) + end
        """Bytes of the whole block, a multiple of 64."""

    @property
    def fields(self) -> list[FieldSchema]:
        """Schemas of the columns, in stored order."""
        return [column.schema for column in self._columns.values()]

    @property
    def lengths(self) -> dict[str, bytes]:
        """Ragged field -> i32 bytes: elements along its first ragged axis, a row each (capped at 2**31 - 1)."""
        return {
            name: np.minimum(column.extents[:, 0], 2**31 - 1).astype("<i4").tobytes()
            for name, column in self._columns.items()
            if column.schema.kind == "ragged" and column.extents is not None
        }

    def column(self, name: str) -> ColumnView:
        """One column. Raises StorageKeyNotFoundError."""
        return _named(self._columns, name)

    def select(self, fields: Sequence[str] | None, rows: Rows) -> EncodedBlock:
        """Some fields (None: all) of some rows; see ``BlockView.select``."""
        columns = self._columns.values() if fields is None else [self.column(name) for name in fields]
        return _selected(self.rows, columns, rows)

    def segments(self) -> list[memoryview]:
        """The block as buffers to be sent one after the other: exactly ``nbytes`` bytes; large ones are not copied."""
        segments: list[memoryview] = []
        small = bytearray(self._head)
        position = 0
        for offset, chunks in self._layout:
            small += bytes(offset - position)
            position = offset
            for chunk in chunks:
                position += chunk.nbytes
                if chunk.nbytes < SEGMENT_BYTES:
                    small += chunk.data
                    continue
                if small:
                    segments.append(memoryview(small))
                    small = bytearray()
                segments.append(chunk.data)
        small += bytes(self.nbytes - len(self._head) - position)
        if small:
            segments.append(memoryview(small))
        return segments

    def write_into(self, target: memoryview | bytearray | Bytes) -> None:
        """Write the block to the start of ``target``: chunk by chunk, the GIL released during large ones.

        Raises InvalidInputError if ``target`` has fewer than ``nbytes`` bytes or is read-only.
        """
        out = as_bytes(target)
        if out.nbytes < self.nbytes or not out.flags.writeable:
            raise InvalidInputError(
                f"a block of {self.nbytes} bytes needs a writable buffer of that size, not "
                f"{out.nbytes} bytes, {'writable' if out.flags.writeable else 'read-only'}"
            )
        position = len(self._head)
        out[:position] = as_bytes(self._head)
        for offset, chunks in self._layout:
            start = len(self._head) + offset
            out[position:start] = 0
            position = start
            for chunk in chunks:
                end = position + chunk.nbytes
                if isinstance(chunk, np.ndarray):
                    copy_bytes(out[position:end], chunk)
                else:
                    chunk.copy_into(out[position:end])
                position = end
        out[position : self.nbytes] = 0

    def places(self) -> Iterator[tuple[int, Chunk]]:
        """(offset in the block, bytes) of all that it consists of but padding."""
        yield 0, as_bytes(self._head)
        for offset, chunks in self._layout:
            position = len(self._head) + offset
            for chunk in chunks:
                yield position, chunk
                position += chunk.nbytes

    def to_bytes(self) -> bytearray:
        """The block in one new buffer."""
        out = bytearray(self.nbytes)
        self.write_into(out)
        return out


class BlockView:
    """A block read in place from any contiguous buffer, which may be longer than the block.

    Raises CorruptBlockError if the header is damaged or does not fit the buffer. The sizes of single rows are checked
    when a column's rows are first located.
    """

    __slots__ = ("_columns", "_data", "_described", "fields", "memory", "nbytes", "rows")

    def __init__(self, buffer: memoryview | bytes | bytearray | Bytes) -> None:
        data = as_bytes(buffer)
        start = self._describe(data, data.nbytes)
        if isinstance(buffer, np.ndarray):
            data = np.frombuffer(data.data, np.uint8)  # slices of an array refer to its own base, past the array
        self.memory = data
        """The array that everything made of this view, without a copy, refers to as its owner."""
        self._data = data[start : self.nbytes]

    def _describe(self, head: Bytes, available: int) -> int:
        """Take over what the header says of a block in ``available`` bytes; where its data starts."""
        header, start = _read_header(head)
        self.rows = header.rows
        self.nbytes = start + header.data_bytes
        """Bytes of the whole block."""
        if self.nbytes > available:
            raise CorruptBlockError(f"block of {self.nbytes} bytes in a buffer of {available}: truncated")
        self.fields = [FieldSchema(c.name, c.kind, c.dtype, c.shape) for c in header.columns]
        self._described: dict[str, tuple[FieldSchema, list[tuple[int, int]]]] = {}
        for schema, column in zip(self.fields, header.columns, strict=True):
            _check_column(column, header)
            self._described[schema.name] = (schema, column.buffers)
        if len(self._described) != len(self.fields):
            raise CorruptBlockError("block header is damaged: a field is named twice")
        self._columns: dict[str, ColumnView] = {}
        return start

    def column(self, name: str) -> ColumnView:
        """One column as views of the buffer. Raises StorageKeyNotFoundError."""
        column = self._columns.get(name)
        if column is None:
            schema, ((low, size), *rest) = self._described_as(name)
            extents = None
            for offset, nbytes in rest:
                extents = self._data[offset : offset + nbytes].view("<i8")
            column = self._columns[name] = self._made(schema, self._data[low : low + size], extents)
        return column

    def _described_as(self, name: str) -> tuple[FieldSchema, list[tuple[int, int]]]:
        return _named(self._described, name)

    def _made(self, schema: FieldSchema, values: Chunk, extents: Int64s | None) -> ColumnView:
        if schema.kind == "ragged" and extents is not None:
            extents = extents.reshape(self.rows, (schema.shape or ()).count(None))
        return ColumnView(schema, self.rows, [values], extents)

    def places(self, name: str, rows: Rows) -> list[tuple[int, int]]:
        """(start, stop) within the block of the bytes that rows of a column need; looks at the header alone.

        Rows are told apart only where they are a range of a dense column. Raises StorageKeyNotFoundError.
        """
        schema, buffers = _named(self._described, name)
        head = self.nbytes - self._data.nbytes
        if schema.kind == "dense" and isinstance(rows, tuple) and self.rows:
            start, row_bytes = head + buffers[0][0], buffers[0][1] // self.rows
            return [(start + rows[0] * row_bytes, start + rows[1] * row_bytes)]
        return [(head + offset, head + offset + nbytes) for offset, nbytes in buffers]

    def select(self, fields: Sequence[str] | None, rows: Rows) -> EncodedBlock:
        """Some fields (None: all) of some rows as a block to be written; contiguous rows are not copied.

        Raises StorageKeyNotFoundError for an unknown field, InvalidInputError for rows outside the block.
        """
        names = [schema.name for schema in self.fields] if fields is None else fields
        return _selected(self.rows, [self.column(name) for name in names], rows)


def concatenate(blocks: Sequence[EncodedBlock | BlockView]) -> EncodedBlock:
    """The rows of all ``blocks`` one after the other, nothing copied. All must have the same fields.

    Raises InvalidInputError where names, kinds, dtypes or shapes differ, or ``blocks`` is empty.
    """
    if not blocks:
        raise InvalidInputError("nothing to concatenate")
    names = [schema.name for schema in blocks[0].fields]
    for block in blocks:
        if {schema.name for schema in block.fields} != set(names):
            raise InvalidInputError(f"blocks with different fields cannot be concatenated: {sorted(names)} expected")
    columns = [concatenate_columns([block.column(name) for block in blocks]) for name in names]
    return EncodedBlock(sum(block.rows for block in blocks), columns)


def _named(columns: dict[str, _Found], name: str) -> _Found:
    try:
        return columns[name]
    except KeyError:
        raise StorageKeyNotFoundError(f"field {name!r} is not in the block, which has {sorted(columns)}") from None


def _selected(total: int, columns: Iterable[ColumnView], rows: Rows) -> EncodedBlock:
    picked = [column.take(rows) for column in columns]
    if picked:
        return EncodedBlock(picked[0].rows, picked)
    if rows is None:
        return EncodedBlock(total, ())
    return EncodedBlock(rows[1] - rows[0] if isinstance(rows, tuple) else len(rows), ())


def _read_header(data: Bytes) -> tuple[_Header, int]:
    """The header and where the data starts."""
    if data.nbytes < PREFIX_BYTES or data[:4].tobytes() != MAGIC:
        raise CorruptBlockError(f"not a block: {data.nbytes} bytes starting with {data[:4].tobytes()!r}")
    size = int.from_bytes(data[4:8].tobytes(), "little")
    if size > MAX_HEADER_BYTES or PREFIX_BYTES + size > data.nbytes:
        raise CorruptBlockError(f"block header of {size} bytes in a buffer of {data.nbytes}: truncated or damaged")
    try:
        header = _decode_header(data[PREFIX_BYTES : PREFIX_BYTES + size].data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBlockError(f"block header is damaged: {error}") from error
    return header, _aligned(PREFIX_BYTES + size)


def _check_column(column: _Column, header: _Header) -> None:
    """Raise CorruptBlockError unless the column's buffers lie in the data and have the sizes its kind asks for."""
    problem = _column_problem(column, header.rows)
    if problem is None:
        for offset, nbytes in column.buffers:
            if offset % ALIGN or offset + nbytes > header.data_bytes:
                problem = f"a buffer at {offset} of {nbytes} bytes in a block with {header.data_bytes}"
    if problem is not None:
        raise CorruptBlockError(f"column {column.name!r} is damaged: {problem}")


def _column_problem(column: _Column, rows: int) -> str | None:
    tensors = column.kind in ("dense", "ragged")
    if len(column.buffers) != (1 if column.kind == "dense" else 2):
        return f"{len(column.buffers)} buffers in a {column.kind} column"
    if not tensors:
        if column.shape is not None or (column.kind == "text" and column.dtype not in TEXT_TYPES):
            return f"shape {column.shape} and dtype {column.dtype!r} in a {column.kind} column"
        return None if column.buffers[1][1] == rows * 8 else f"{column.buffers[1][1]} bytes of lengths for {rows} rows"
    if column.dtype not in ITEM_BYTES or column.shape is None:
        return f"shape {column.shape} and dtype {column.dtype!r} in a {column.kind} column"
    largest = ITEM_BYTES[column.dtype]
    for size in column.shape:
        largest *= max(size or 1, 1)
    if largest > MAX_BYTES:
        return "a row larger than 2**62 bytes"
    axes = column.shape.count(None)
    if (axes > 0) != (column.kind == "ragged"):
        return f"shape {column.shape} in a {column.kind} column"
    if axes:
        expected = rows * axes * 8
        return None if column.buffers[1][1] == expected else f"{column.buffers[1][1]} bytes of sizes for {rows} rows"
    schema = FieldSchema(column.name, column.kind, column.dtype, column.shape)
    expected = rows * fixed_elements(schema) * ITEM_BYTES[column.dtype]
    return None if column.buffers[0][1] == expected else f"{column.buffers[0][1]} bytes of values, expected {expected}"
