"""Batches as blocks: every field becomes a column that refers to the batch's own memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from transfer_queue.columns.block import EncodedBlock
from transfer_queue.columns.column import ITEM_BYTES, Chunk, ColumnView, Int64s, as_bytes
from transfer_queue.columns.device import column_bytes
from transfer_queue.columns.documents import encode_rows
from transfer_queue.columns.kinds import is_kind
from transfer_queue.columns.nested import jagged_parts
from transfer_queue.columns.tensor_bytes import check_storable, dtype_name, tensor_to_bytes
from transfer_queue.columns.texts import encode_texts
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import InvalidInputError, InvalidTypeError, UnsupportedFieldError

if TYPE_CHECKING:
    from tensordict import LazyStackedTensorDict, TensorDictBase

__all__ = ["alike", "encode", "numbers_as_tensors", "split", "tensor_rows_column"]

NAME_CHARACTERS: Final = 255
CHUNK_BYTES: Final = 4096
"""Tensors of rows that are smaller than this on average are joined into one buffer."""


def encode(
    fields: TensorDictBase | Mapping[str, Any], *, rows: int | None = None, allow_pickle: bool = True
) -> EncodedBlock:
    """A batch as a block. Everything is checked here, before anything is stored; nothing is copied yet.

    ``fields``: a TensorDict of batch size ``[rows, ...]``, or a mapping of names to tensors, arrays, or lists with one
    value a row. Values of a list stay Python values, except that a list of tensors is a tensor column. ``rows``: how
    many rows each field must have; None takes them from the batch. The batch must not change until the block is
    written.

    Raises InvalidInputError for bad names, lengths, dtypes or layouts, InvalidTypeError for values that cannot be
    stored, UnsupportedFieldError for a nested TensorDict.
    """
    values = {_checked_name(name): value for name, value in _values(fields).items()}
    total = _row_count(fields, values) if rows is None else rows
    batch_size = list(fields.batch_size) if is_kind(fields, "TensorDictBase") else [total]  # type: ignore[union-attr]
    if batch_size[:1] != [total]:
        raise InvalidInputError(f"Inconsistent batch dimension: batch size {batch_size} does not match {total} rows")
    return EncodedBlock(total, [_column(name, value, total, allow_pickle) for name, value in values.items()])


def numbers_as_tensors(fields: Any) -> Any:
    """A mapping whose lists of plain numbers are tensors, as a TensorDict makes them; anything else as it is.

    Lists of float and of int and float become float32 (torch's default dtype), of int int64, of bool bool.
    """
    if is_kind(fields, "TensorDictBase") or not isinstance(fields, Mapping):
        return fields
    return {name: _as_numbers(value) for name, value in fields.items()}


def _as_numbers(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not value:
        return value
    kinds = set(map(type, value))
    if kinds != {bool} and not kinds <= {int, float}:
        return value
    try:
        return torch.tensor(value, device="cpu")
    except (RuntimeError, ValueError, OverflowError):  # an int of more than 64 bits stays what it is
        return value


def split(block: EncodedBlock, parts: Sequence[tuple[int, int]]) -> list[EncodedBlock]:
    """The rows ``start:stop`` of each part as a block of its own; nothing is copied. Raises InvalidInputError."""
    return [block.select(None, part) for part in parts]


def _values(fields: Any) -> dict[str, Any]:
    if is_kind(fields, "LazyStackedTensorDict"):
        return _stacked_values(fields)
    if is_kind(fields, "TensorDictBase"):
        return {name: fields.get(name) for name in fields.keys()}  # noqa: SIM118  a TensorDict iterates over rows
    if isinstance(fields, Mapping):
        return dict(fields)
    raise InvalidTypeError(f"fields must be a TensorDict or a mapping of names to values, not {type(fields).__name__}")


def _stacked_values(fields: LazyStackedTensorDict) -> dict[str, Any]:
    members, axis = fields.tensordicts, fields.stack_dim
    names = list(members[0].keys()) if members else []
    for number, member in enumerate(members):
        differing = set(names).symmetric_difference(member.keys())
        if differing:
            what = "rows, row" if axis == 0 else "parts, part"
            raise InvalidInputError(f"field {sorted(differing)[0]!r} is missing in some {what} {number} tells")
    if axis == 0:
        return {name: [_row_value(member.get(name), name) for member in members] for name in names}
    return {name: _stacked_value(fields, name) for name in names}


def _stacked_value(fields: LazyStackedTensorDict, name: str) -> Any:
    try:
        return fields.get(name)
    except RuntimeError as error:  # torch cannot stack the parts
        shapes = [list(getattr(member.get(name), "shape", ())) for member in fields.tensordicts]
        raise UnsupportedFieldError(
            f"field {name!r}: a lazy stack along dimension {fields.stack_dim} of parts of the shapes {shapes[:5]} is "
            "not a tensor; pad them to one shape, or stack along dimension 0, where each part is a row"
        ) from error


def _row_count(fields: Any, values: Mapping[str, Any]) -> int:
    if is_kind(fields, "TensorDictBase"):
        if not fields.batch_size:
            raise InvalidInputError("the TensorDict has batch size []; its first batch dimension must be the rows")
        return int(fields.batch_size[0])
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            raise _inconsistent(name, "a tensor without dimensions", "a row axis")
        if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
            return len(value) if not isinstance(value, torch.Tensor) else int(value.size(0))
    raise InvalidInputError("no field tells how many rows there are: give tensors or lists, with an entry a row")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidTypeError(f"field names must be strings, not {type(name).__name__}")
    if not 1 <= len(name) <= NAME_CHARACTERS:
        raise InvalidInputError(
            f"field name {name[:20]!r} has {len(name)} characters; names have 1 to {NAME_CHARACTERS} characters"
        )
    if not name.isprintable():
        raise InvalidInputError(f"field name {name!r} contains a character that is not printable")
    return str.__str__(name)


def _inconsistent(name: str, found: object, expected: object) -> InvalidInputError:
    return InvalidInputError(f"Inconsistent batch dimension: field {name!r} has {found}, expected {expected}")


def _column(name: str, value: Any, rows: int, allow_pickle: bool) -> ColumnView:
    """One field. Raises as ``encode``."""
    if is_kind(value, "NonTensorData") and _has_rows(value.data, rows):
        value = value.data
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.size(0) != rows:
            found = "no row axis" if value.dim() == 0 else f"{value.size(0)} rows"
            raise _inconsistent(name, found, rows)
        return _tensor_column(name, value, rows)
    if isinstance(value, np.ndarray) and value.ndim and len(value) == rows and value.dtype.kind in "biufc":
        return _array_column(name, value, rows)
    values = _row_values(name, value)
    if len(values) != rows:
        raise _inconsistent(name, f"{len(values)} rows", rows)
    return _rows_column(name, values, allow_pickle)


def _has_rows(data: Any, rows: int) -> bool:
    """Whether the data of one NonTensorData holds a value for each row."""
    if isinstance(data, np.ndarray):
        return bool(data.ndim)
    return isinstance(data, (list, tuple)) and len(data) == rows


def _row_values(name: str, value: Any) -> list[Any]:
    if is_kind(value, "NonTensorData"):
        raise InvalidTypeError(f"field {name!r} is one NonTensorData for the whole batch; give a value for each row")
    if is_kind(value, "NonTensorStack") or (
        is_kind(value, "LazyStackedTensorDict") and all(is_kind(m, "NonTensorData") for m in value.tensordicts)
    ):
        return [_row_value(member, name) for member in value.tensordicts]
    if is_kind(value, "TensorDictBase"):
        raise UnsupportedFieldError(f"field {name!r} is a nested TensorDict; put its entries as fields of their own")
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return list(value)
    raise InvalidTypeError(
        f"field {name!r} is a {type(value).__name__}; a field is a tensor, an array, or a list with one value a row"
    )


def _row_value(member: Any, name: str) -> Any:
    """The plain value of one row of a stack."""
    if is_kind(member, "NonTensorData"):
        return member.data if not member.batch_size else member.tolist()
    if is_kind(member, "NonTensorStack"):
        return member.tolist()
    if is_kind(member, "TensorDictBase"):
        raise UnsupportedFieldError(f"field {name!r} is a nested TensorDict; put its entries as fields of their own")
    return member


def _tensor_column(name: str, value: torch.Tensor, rows: int) -> ColumnView:
    where = f"field {name!r}"
    dtype = dtype_name(value.dtype, where)
    if not value.is_nested:
        schema = FieldSchema(name, "dense", dtype, tuple(value.shape[1:]))
        return ColumnView(schema, rows, [column_bytes(value, where)], None)
    parts = jagged_parts(value)
    if parts is None:
        ragged: int = getattr(value, "_ragged_idx", 1) - 1
        return tensor_rows_column(name, value.unbind(), ragged, rank=value.dim() - 1, dtype=dtype)
    values, offsets, axis = parts
    shape: list[int | None] = list(values.shape[1:])
    shape.insert(axis - 1, None)
    extents = offsets.diff().numpy().reshape(rows, 1)
    schema = FieldSchema(name, "ragged", dtype, tuple(shape))
    return ColumnView(schema, rows, [column_bytes(values, where)], extents)


def _array_column(name: str, value: npt.NDArray[Any], rows: int) -> ColumnView:
    if value.dtype.name not in ITEM_BYTES:
        raise InvalidInputError(f"field {name!r}: dtype {value.dtype} cannot be stored")
    native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    return ColumnView(FieldSchema(name, "dense", value.dtype.name, value.shape[1:]), rows, [as_bytes(native)], None)


def _rows_column(name: str, values: list[Any], allow_pickle: bool) -> ColumnView:
    """A column of one Python value a row: of tensors, text or objects."""
    kinds = set(map(type, values))
    if values and all(issubclass(kind, torch.Tensor) for kind in kinds) and alike(values):
        return tensor_rows_column(name, values)
    if kinds == {str} or kinds == {str, type(None)}:
        return _text_column(name, "str", values)
    if kinds == {np.str_}:
        return _text_column(name, "numpy.str_", values)
    chunks, lengths = encode_rows(values, allow_pickle=allow_pickle, field=name)
    return ColumnView(FieldSchema(name, "object", "object"), len(values), chunks, lengths)


def alike(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the tensors can be the rows of one tensor column: one dtype, one rank, none nested."""
    return len({(t.dtype, t.dim()) for t in tensors}) == 1 and not any(t.is_nested for t in tensors)


def _text_column(name: str, dtype: str, values: Sequence[str | None]) -> ColumnView:
    chunks, lengths = encode_texts([value or "" for value in values])
    lengths[[number for number, value in enumerate(values) if value is None]] = -1
    return ColumnView(FieldSchema(name, "text", dtype), len(values), chunks, lengths)


def tensor_rows_column(
    name: str,
    tensors: Sequence[torch.Tensor],
    ragged: int | None = None,
    *,
    rank: int | None = None,
    dtype: str | None = None,
) -> ColumnView:
    """A column of one tensor a row, of one dtype and rank: dense if all shapes are equal, else ragged.

    ``ragged``: the axis that counts as ragged even if all shapes are equal. ``rank`` and ``dtype`` are needed when
    there are no rows. Raises InvalidInputError naming field and row.
    """
    rank = tensors[0].dim() if rank is None else rank
    dtype = dtype_name(tensors[0].dtype, f"field {name!r}") if dtype is None else dtype
    shapes = np.array([tuple(tensor.shape) for tensor in tensors], np.int64).reshape(len(tensors), rank)
    sizes: list[int] = shapes[0].tolist() if len(shapes) else [0] * rank
    axes = np.flatnonzero((shapes != sizes).any(axis=0)).tolist()
    if not axes and ragged is not None and rank:
        axes = [ragged]
    front = axes[0] if len(axes) == 1 else 0
    chunks = _row_chunks(name, [tensor.movedim(front, 0) for tensor in tensors] if front else tensors)
    shape = tuple(None if axis in axes else sizes[axis] for axis in range(rank))
    extents: Int64s | None = np.ascontiguousarray(shapes[:, axes]) if axes else None
    schema = FieldSchema(name, "ragged" if axes else "dense", dtype, shape)
    return ColumnView(schema, len(tensors), chunks, extents)


def _row_chunks(name: str, tensors: Sequence[torch.Tensor]) -> list[Chunk]:
    for number, tensor in enumerate(tensors):
        check_storable(tensor, f"field {name!r}, row {number}")
    total = sum(tensor.nbytes for tensor in tensors)
    if tensors and (total < CHUNK_BYTES * len(tensors) or any(tensor.device.type != "cpu" for tensor in tensors)):
        joined = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return [column_bytes(joined, f"field {name!r}")]
    return [tensor_to_bytes(tensor, f"field {name!r}") for tensor in tensors]
