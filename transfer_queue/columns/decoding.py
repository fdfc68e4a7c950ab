"""Blocks as batches: the rows of any number of blocks assembled into one TensorDict."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.columns.block import BlockView
from transfer_queue.columns.column import Bytes, Chunk, ColumnView, Int64s, Rows
from transfer_queue.columns.copying import copy_bytes
from transfer_queue.columns.device import CudaBytes
from transfer_queue.columns.documents import decode_rows
from transfer_queue.columns.encoding import alike, tensor_rows_column
from transfer_queue.columns.nested import jagged, jagged_parts, strided_nested_from_buffer
from transfer_queue.columns.recycling import empty_bytes
from transfer_queue.columns.tensor_bytes import DTYPES, tensor_from_bytes
from transfer_queue.columns.texts import LONG_BYTES, decode_texts
from transfer_queue.control.schema import FieldSchema, Kind
from transfer_queue.errors import InvalidInputError

__all__ = ["Layout", "Piece", "decode", "decode_into"]

Layout: TypeAlias = Literal["jagged", "dense"]
log = logging.getLogger(__name__)
_told: set[tuple[str, frozenset[str]]] = set()
_SCALARS: Final = frozenset({str, int, float, bool, bytes})


@dataclass(frozen=True)
class Piece:
    """Rows of a block and where they go: ``rows[i]`` of ``view`` becomes row ``positions[i]`` of the batch.

    Both are ``(start, stop)``, an integer array, or None for all.
    """

    view: BlockView
    rows: Rows
    positions: Rows


@dataclass(frozen=True)
class _Part:
    """A piece of one column, with its rows and positions made definite."""

    column: ColumnView
    rows: tuple[int, int] | Int64s
    positions: tuple[int, int] | Int64s

    @property
    def whole(self) -> bool:
        return isinstance(self.rows, tuple) and isinstance(self.positions, tuple)


def decode(
    pieces: Mapping[str, Sequence[Piece]],
    n: int,
    fields: Sequence[FieldSchema],
    *,
    layout: Layout = "jagged",
    copy: bool = True,
    least_view: int = 0,
    allow_pickle: bool = True,
    device: torch.device | None = None,
) -> TensorDict:
    """The batch of ``n`` rows that ``pieces`` (by field) make up, with batch size ``[n]``.

    ``fields``: the fields to return. Rank-0 rows come back as a dense ``(n,)`` tensor; other tensor rows as a jagged
    nested tensor, or with layout "dense" as one dense tensor where all rows have one shape; rows ragged in several
    axes as a strided nested tensor; text, objects, and tensors of differing dtype or rank as a NonTensorStack.
    Fields with equal row lengths share their offsets. ``copy`` False: a column of ``least_view`` bytes or more that
    lies in one piece may be a view of the block's memory. ``device``: tensors come
    to lie there, by copies on its current stream that may still be under way at the return.

    Raises CorruptBlockError for damaged blocks, InvalidInputError if the pieces do not cover each row exactly once,
    InvalidTypeError for pickled values without ``allow_pickle``.
    """
    assembly = _Assembly(n, layout, copy, allow_pickle, device, least_view)
    found: dict[Any, Any] = {}
    with torch.inference_mode(False):  # the batch may be trained on outside of the caller's mode
        for schema in fields:
            found[schema.name] = assembly.field(schema, assembly.parts(schema.name, pieces[schema.name]))
    if all(isinstance(value, torch.Tensor) for value in found.values()):
        # The checks of the public constructor cost more than anything else here; all tensors have n rows.
        return TensorDict._new_unsafe(found, batch_size=torch.Size([n]))
    return TensorDict(found, batch_size=[n])


def decode_into(
    pieces: Mapping[str, Sequence[Piece]],
    n: int,
    fields: Sequence[FieldSchema],
    out: Mapping[str, torch.Tensor],
    *,
    allow_pickle: bool = True,
) -> None:
    """Write the batch that ``decode`` would return into the tensors ``out[field]``, on any device.

    A tensor of shape ``(n, ...)`` takes rows of one shape, a jagged one rows of the lengths it has itself; dtypes must
    be equal. Rows that lie in a contiguous CPU tensor's shape are copied once. All fields are checked before any is
    written. Raises InvalidInputError naming the field, what it has and what ``out`` has; and as ``decode``.
    """
    if others := sorted(set(out.keys()) - {schema.name for schema in fields}):
        raise InvalidInputError(
            f"out has entries {others}, which are not among the fields that are read; leave them out"
        )
    assembly = _Assembly(n, "dense", False, allow_pickle)
    direct: list[tuple[torch.Tensor, FieldSchema, list[_Part]]] = []
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for schema in fields:
        target = _target(out, schema.name)
        parts = assembly.parts(schema.name, pieces[schema.name])
        merged = _merged({part.column.schema for part in parts}) if parts else None
        if merged is not None and merged.kind == "dense" and not target.is_nested:
            dtype, shape = DTYPES.get(merged.dtype), [n, *(size or 0 for size in merged.shape or ())]
            _check_target(schema.name, target, f"{dtype} {shape}", dtype, shape)
            direct.append((target, merged, parts))
            continue
        assembly.layout = "jagged" if target.is_nested else "dense"
        staged.append(_staged(schema.name, assembly.field(schema, parts), target))
    for target, merged, parts in direct:
        if target.is_contiguous() and not target.numel():
            continue
        flat = target.view(-1).view(torch.uint8) if target.is_contiguous() else None
        if flat is not None and target.device.type == "cpu":
            assembly.dense(merged, parts, flat.numpy())
        elif flat is not None and (chunks := _in_order(parts)) is not None:
            _copy_chunks(chunks, flat)
        else:
            column = assembly.dense(merged, parts)
            target.copy_(tensor_from_bytes(column.values, target.dtype, target.shape), non_blocking=True)
    for target, value in staged:
        target.copy_(value, non_blocking=True)


def _target(out: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    target = out.get(name)
    if not isinstance(target, torch.Tensor) or target.layout not in (torch.strided, torch.jagged) or target.is_meta:
        where = f" on {target.device}" if isinstance(target, torch.Tensor) else ""
        has = "no entry" if target is None else f"a {type(target).__name__}{where}"
        raise InvalidInputError(f"out has {has} for field {name!r}; give a dense or jagged tensor, or select fields")
    return target.detach()


def _check_target(
    name: str, target: torch.Tensor, found: str, dtype: torch.dtype | None, shape: Sequence[int] | None
) -> None:
    if target.dtype is not dtype or list(target.shape) != shape:
        raise InvalidInputError(
            f"field {name!r} is {found}, and out has a tensor of {target.dtype} {list(target.shape)} for it"
        )


def _staged(name: str, value: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of an assembled value: (memory of ``out``, memory of the value)."""
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"field {name!r} is no tensor and cannot be read into out; leave it out of the fields")
    if not target.is_nested:
        shape = None if value.is_nested else list(value.shape)
        found = f"{value.dtype} {'with rows of differing shapes' if shape is None else shape}"
        _check_target(name, target, found, value.dtype, shape)
        return target, value
    fits = value.is_nested and value.layout is torch.jagged and value.dtype is target.dtype
    if fits:
        mine, theirs = jagged_parts(value), jagged_parts(target)
        same = mine and theirs and mine[2] == theirs[2] and mine[0].shape == theirs[0].shape
        if mine and theirs and same and torch.equal(mine[1], theirs[1]):
            return theirs[0], mine[0]
    raise InvalidInputError(
        f"field {name!r}: the jagged tensor of {target.dtype} in out has not the lengths, shapes or dtype of the rows"
    )


class _Assembly:
    """One call of ``decode``: what its fields share."""

    def __init__(
        self,
        n: int,
        layout: Layout,
        copy: bool,
        allow_pickle: bool,
        device: torch.device | None = None,
        least_view: int = 0,
    ) -> None:
        self.n = n
        self.layout = layout
        self.copy = copy
        self.least_view = least_view
        self.allow_pickle = allow_pickle
        self.device = device
        self.offsets: dict[bytes, tuple[torch.Tensor, tuple[int, int]]] = {}
        self.covered: set[int] = set()

    def parts(self, name: str, pieces: Sequence[Piece]) -> list[_Part]:
        """The pieces of one field, which give each row once."""
        parts = [_part(piece.view.column(name), piece, self.n) for piece in pieces]
        if id(pieces) not in self.covered:
            self.check_cover(parts, name)
            self.covered.add(id(pieces))
        return parts

    def field(self, schema: FieldSchema, parts: Sequence[_Part]) -> Any:
        if not parts:
            empty = ColumnView(schema, 0, [], _no_extents(schema))
            return _non_tensor_stack([]) if schema.kind in ("text", "object") else self.container(empty)
        merged = _merged({part.column.schema for part in parts})
        if merged is None:
            return self.mixed(schema.name, parts)
        if merged.kind in ("text", "object"):
            return _non_tensor_stack(self.values(parts))
        return self.container(self.dense(merged, parts) if merged.kind == "dense" else self.ragged(merged, parts))

    def check_cover(self, parts: Sequence[_Part], name: str) -> None:
        if len(parts) == 1 and isinstance(parts[0].positions, tuple) and parts[0].positions == (0, self.n):
            return
        seen = np.zeros(self.n, bool)
        count = 0
        for part in parts:
            if isinstance(part.positions, tuple):
                seen[part.positions[0] : part.positions[1]] = True
                count += part.positions[1] - part.positions[0]
            else:
                seen[part.positions] = True
                count += len(part.positions)
        if count != self.n or not seen.all():
            raise InvalidInputError(f"the pieces of field {name!r} give {count} rows for a batch of {self.n}")

    def mixed(self, name: str, parts: Sequence[_Part]) -> Any:
        """Columns without a common form: their rows put together one by one."""
        rows = self.values(parts)
        if all(isinstance(row, torch.Tensor) for row in rows) and alike(rows):
            return self.container(tensor_rows_column(name, rows))
        _tell_mixed(name, parts)
        return _non_tensor_stack(rows)

    def values(self, parts: Sequence[_Part]) -> list[Any]:
        """One Python value or tensor for each row of the batch."""
        values: list[Any] = [None] * self.n
        for part in parts:
            found = _python_rows(part.column, part.rows, self.allow_pickle)
            if isinstance(part.positions, tuple):
                values[part.positions[0] : part.positions[1]] = found
            else:
                for position, value in zip(part.positions.tolist(), found, strict=True):
                    values[position] = value
        return values

    def may_stay(self, parts: Sequence[_Part], nbytes: int) -> bool:
        """Whether a column of ``nbytes`` may be a view of the memory of its only part."""
        return not self.copy and len(parts) == 1 and parts[0].whole and nbytes >= self.least_view

    def dense(self, schema: FieldSchema, parts: Sequence[_Part], out: Bytes | None = None) -> ColumnView:
        """``out``: memory for the rows, if they must come to lie there."""
        size = parts[0].column.row_bytes
        if out is None:
            if self.may_stay(parts, self.n * size):
                return parts[0].column.take(parts[0].rows)
            if self.device is not None and (chunks := _in_order(parts)) is not None:
                return ColumnView(schema, self.n, chunks, None)  # each goes to the device from where it lies
            out = empty_bytes(self.n * size)
        for part in parts:
            on_device = part.column.chunks[0] if part.whole and len(part.column.chunks) == 1 else None
            if isinstance(on_device, CudaBytes):
                (first, last), (low, high) = part.rows, part.positions
                on_device[first * size : last * size].copy_into(out[low * size : high * size])
                continue
            values = part.column.values
            if isinstance(part.rows, tuple) and isinstance(part.positions, tuple):
                low, high = part.positions
                copy_bytes(out[low * size : high * size], values[part.rows[0] * size : part.rows[1] * size])
            elif size:
                source, target = values.reshape(-1, size), out.reshape(self.n, size)
                if isinstance(part.positions, tuple):
                    rows = _indexes(part.rows)
                    np.take(source, rows, axis=0, out=target[slice(*part.positions)], mode="clip")
                else:
                    target[part.positions] = source[_index(part.rows)]
        return ColumnView(schema, self.n, [out], None)

    def ragged(self, schema: FieldSchema, parts: Sequence[_Part]) -> ColumnView:
        if self.may_stay(parts, parts[0].column.value_bytes):
            _ = parts[0].column.starts  # raises if the sizes do not fit the bytes
            return parts[0].column.take(parts[0].rows)
        shape = schema.shape or ()
        axes = [axis for axis, size in enumerate(shape) if size is None]
        extents = np.empty((self.n, len(axes)), np.int64)
        for part in parts:
            # Before anything is allocated by these sizes: do they fit the bytes that are there?
            _ = part.column.starts
            extents[_index(part.positions)] = _extents_along(part.column, axes)[_index(part.rows)]
        total = int(ColumnView(schema, self.n, [], extents).row_sizes.sum())
        out = empty_bytes(total)
        column = ColumnView(schema, self.n, [out], extents)
        for part in parts:
            _copy_rows(part, column.starts, out)
        return column

    def container(self, column: ColumnView) -> Any:
        """The tensor of an assembled dense or ragged column."""
        shape = column.schema.shape or ()
        dtype = DTYPES.get(column.schema.dtype)
        if dtype is None:
            raise InvalidInputError(f"field {column.schema.name!r}: this torch has no dtype {column.schema.dtype}")
        n = column.rows
        axes = [axis for axis, size in enumerate(shape) if size is None]
        fixed = [size for size in shape if size is not None]
        if not axes and (not shape or self.layout == "dense"):
            return self.placed(column, dtype, [n, *fixed])
        extents = column.extents
        if extents is None:
            offsets, bounds = self.shared_offsets(np.full(n, fixed[0], np.int64))
            return jagged(self.placed(column, dtype, [n * fixed[0], *fixed[1:]]), offsets, 1, bounds)
        if self.layout == "dense" and n and (extents == extents[0]).all():
            uniform = _uniform(column, dtype, axes, extents[0].tolist())
            return uniform if self.device is None else uniform.to(self.device, non_blocking=True)
        if len(axes) > 1:
            flat = self.placed(column, dtype, [column.value_bytes // dtype.itemsize])
            return strided_nested_from_buffer(flat, torch.from_numpy(_shapes(column, axes, extents)))
        offsets, bounds = self.shared_offsets(extents[:, 0])
        axis = axes[0]
        values = self.placed(column, dtype, [int(extents[:, 0].sum()), *fixed])
        return jagged(values, offsets, axis + 1, bounds)

    def placed(self, column: ColumnView, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The values of a column as a tensor, on the device that is wanted."""
        if self.device is None:
            return tensor_from_bytes(column.values, dtype, shape)
        if len(column.chunks) == 1 and isinstance(column.chunks[0], np.ndarray):
            return tensor_from_bytes(column.values, dtype, shape).to(self.device, non_blocking=True)
        whole = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if whole.numel():
            _copy_chunks(column.chunks, whole.view(-1).view(torch.uint8))
        return whole

    def shared_offsets(self, lengths: Int64s) -> tuple[torch.Tensor, tuple[int, int]]:
        """The offsets of rows of these lengths and the extreme lengths.

        All fields of this batch share the tensor, so that torch can compute with them together. Other batches do not
        share it, so its owner may change it.
        """
        key = lengths.tobytes()
        found = self.offsets.get(key)
        if found is None:
            offsets, bounds = _offsets(lengths)
            found = self.offsets[key] = (
                offsets if self.device is None else offsets.to(self.device, non_blocking=True),
                bounds,
            )
        return found


def _offsets(lengths: Int64s) -> tuple[torch.Tensor, tuple[int, int]]:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends), (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)


def _in_order(parts: Sequence[_Part]) -> list[Chunk] | None:
    """The values of dense parts that are ranges of the batch, in its order; None if some are not."""
    if not all(part.whole for part in parts):
        return None
    ordered = sorted(parts, key=lambda part: part.positions[0])
    return [chunk for part in ordered for chunk in part.column.take(part.rows).chunks]


def _copy_chunks(chunks: Sequence[Chunk], target: torch.Tensor) -> None:
    """One after the other into flat bytes on a device, each from where it lies."""
    start = 0
    for chunk in chunks:
        part = target[start : start + chunk.nbytes]
        if isinstance(chunk, CudaBytes):
            chunk.copy_to(part)
        else:
            assert isinstance(chunk, np.ndarray)
            part.copy_(tensor_from_bytes(chunk, torch.uint8, [chunk.nbytes]), non_blocking=True)
        start += chunk.nbytes


def _tell_mixed(name: str, parts: Sequence[_Part]) -> None:
    """Log, once for a field and its kinds, why a column of tensors comes back as a list."""
    first: dict[str, int] = {}
    filled = [part for part in parts if len(_indexes(part.positions))]
    for part in sorted(filled, key=lambda part: int(_indexes(part.positions)[0])):
        schema = part.column.schema
        if schema.kind not in ("dense", "ragged"):
            what = "text" if schema.kind == "text" else "other values"
        else:
            what = f"{schema.dtype} tensors of rank {len(schema.shape or ())}"
        first.setdefault(what, int(_indexes(part.positions)[0]))
    kinds = " and ".join(f"{what} (row {row} of the batch)" for what, row in first.items())
    if len(first) < 2 or not any("tensors" in what for what in first) or (name, frozenset(first)) in _told:
        return
    _told.add((name, frozenset(first)))
    log.warning(
        "field %r comes back as a list and not as a tensor: its rows are %s; put rows of one dtype and rank",
        name,
        kinds,
    )


def _part(column: ColumnView, piece: Piece, n: int) -> _Part:
    rows = _definite(piece.rows, column.rows, "rows of the block")
    positions = _definite(piece.positions, n, "rows of the batch")
    counts = [r[1] - r[0] if isinstance(r, tuple) else len(r) for r in (rows, positions)]
    if counts[0] != counts[1]:
        raise InvalidInputError(f"a piece has {counts[0]} rows for {counts[1]} positions")
    return _Part(column, rows, positions)


def _definite(rows: Rows, count: int, what: str) -> tuple[int, int] | Int64s:
    """``rows`` without None, as a range where they are one. Raises InvalidInputError outside ``0..count``."""
    if rows is None:
        return 0, count
    if isinstance(rows, tuple):
        first, last = rows[0], rows[1]
        fits = 0 <= first <= last <= count
    else:
        rows = np.asarray(rows)
        if not len(rows):
            return 0, 0
        first, last = int(rows.min()), int(rows.max())
        fits = first >= 0 and last < count
        if fits and last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
            return first, last + 1
    if not fits:
        raise InvalidInputError(f"{what} {first} to {last} are outside the {count} there are")
    return rows


def _index(rows: tuple[int, int] | Int64s) -> slice | Int64s:
    return slice(*rows) if isinstance(rows, tuple) else rows


def _indexes(rows: tuple[int, int] | Int64s) -> Int64s:
    return np.arange(*rows) if isinstance(rows, tuple) else rows


def _no_extents(schema: FieldSchema) -> Int64s | None:
    return np.empty((0, (schema.shape or ()).count(None)), np.int64) if schema.kind == "ragged" else None


def _front(shape: tuple[int | None, ...]) -> int:
    """The axis that comes first in stored order; see ``ColumnView.chunks``."""
    return shape.index(None) if shape.count(None) == 1 else 0


def _merged(schemas: set[FieldSchema]) -> FieldSchema | None:
    """Return the common schema of the columns; None if their rows cannot be copied into one column."""
    first = next(iter(schemas))
    if len(schemas) == 1:
        return first
    kinds = {schema.kind for schema in schemas}
    if kinds <= {"text", "object"}:
        return _schema_as(first, "object", None)
    shapes = [schema.shape or () for schema in schemas]
    if not kinds <= {"dense", "ragged"} or len({(s.dtype, len(s.shape or ())) for s in schemas}) > 1:
        return None
    sizes = [set(axis) for axis in zip(*shapes, strict=True)]
    shape = tuple(axis.pop() if len(axis) == 1 else None for axis in sizes)
    if any(_front(part) != _front(shape) for part in shapes):
        return None
    return _schema_as(first, "ragged" if None in shape else "dense", shape)


def _schema_as(schema: FieldSchema, kind: Kind, shape: tuple[int | None, ...] | None) -> FieldSchema:
    return FieldSchema(schema.name, kind, schema.dtype, shape)


def _extents_along(column: ColumnView, axes: Sequence[int]) -> Int64s:
    """int64 ``(rows, axes)``: the size of each row along ``axes``, ragged in this column or not."""
    shape = column.schema.shape or ()
    own = iter(() if column.extents is None else column.extents.T)
    along = {axis: next(own) if size is None else np.full(column.rows, size) for axis, size in enumerate(shape)}
    return np.stack([along[axis] for axis in axes], axis=1)


def _copy_rows(part: _Part, starts: Int64s, out: Bytes) -> None:
    """Copy the rows of ``part`` to where ``starts`` puts them in ``out``."""
    source, values = part.column.starts, part.column.values
    if isinstance(part.rows, tuple) and isinstance(part.positions, tuple):
        low, high = source[part.rows[0]], source[part.rows[1]]
        copy_bytes(out[starts[part.positions[0]] : starts[part.positions[1]]], values[low:high])
        return
    rows, positions = _indexes(part.rows), _indexes(part.positions)
    lows, highs = source[rows].tolist(), source[rows + 1].tolist()
    slices = [values[low:high] for low, high in zip(lows, highs, strict=True)]
    if isinstance(part.positions, tuple):
        np.concatenate(slices, out=out[starts[part.positions[0]] : starts[part.positions[1]]])
        return
    for position, row in zip(starts[positions].tolist(), slices, strict=True):
        out[position : position + row.nbytes] = row


def _uniform(column: ColumnView, dtype: torch.dtype, axes: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Ragged rows that all have one shape as a dense tensor."""
    shape = column.schema.shape or ()
    if len(axes) == 1:
        fixed = [size for size in shape if size is not None]
        moved = tensor_from_bytes(column.values, dtype, [column.rows, sizes[0], *fixed])
        return moved.movedim(1, axes[0] + 1).contiguous()
    along = iter(sizes)
    full = [next(along) if size is None else size for size in shape]
    return tensor_from_bytes(column.values, dtype, [column.rows, *full])


def _shapes(column: ColumnView, axes: Sequence[int], extents: Int64s) -> Int64s:
    """int64 ``(rows, rank)``: the shape of each row."""
    shape = column.schema.shape or ()
    shapes = np.empty((column.rows, len(shape)), np.int64)
    for axis, size in enumerate(shape):
        shapes[:, axis] = extents[:, axes.index(axis)] if size is None else size
    return shapes


def _python_rows(column: ColumnView, rows: tuple[int, int] | Int64s, allow_pickle: bool) -> list[Any]:
    """One str, None, object or tensor for each of the picked rows."""
    if column.schema.kind == "text":
        return decode_texts(column, rows)
    if column.schema.kind == "object" and column.value_bytes >= LONG_BYTES * column.rows:
        index = _index(rows)  # from where they lie, as gathering them would copy them once more
        return decode_rows(column.values, column.starts[:-1][index], column.starts[1:][index], allow_pickle)
    column = column.take(rows)
    starts = column.starts
    if column.schema.kind == "object":
        return decode_rows(column.values, starts[:-1], starts[1:], allow_pickle)
    shapes = _shapes(column, *_ragged_axes(column))
    front = _front(column.schema.shape or ())
    tensors = []
    for low, high, shape in zip(starts[:-1].tolist(), starts[1:].tolist(), shapes.tolist(), strict=True):
        stored = [shape[front], *shape[:front], *shape[front + 1 :]] if shape else shape
        row = tensor_from_bytes(column.values[low:high].copy(), DTYPES[column.schema.dtype], stored)
        tensors.append(row.movedim(0, front) if front else row)
    return tensors


def _ragged_axes(column: ColumnView) -> tuple[list[int], Int64s]:
    axes = [axis for axis, size in enumerate(column.schema.shape or ()) if size is None]
    return axes, np.empty((column.rows, 0), np.int64) if column.extents is None else column.extents


def _non_tensor_stack(values: Sequence[Any]) -> Any:
    """One entry a row, also where all values are equal."""
    if not values:
        return NonTensorData(data=[], batch_size=[0])
    return NonTensorStack(*[v if type(v) in _SCALARS or v is None else NonTensorData(data=v) for v in values])
