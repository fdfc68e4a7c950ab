"""Metadata of batches: which rows, which fields of which types and shapes, ready or not, with which tags."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from transfer_queue._html import html_table
from transfer_queue._kv_meta import KVBatchMeta, as_positions, check_parts, chunk_bounds, same_value, united_info
from transfer_queue.compat.sample_meta import FieldMeta, ProductionStatus, RowField, Sample, SampleMeta
from transfer_queue.control.commands import Batch, ColumnGroupLocations
from transfer_queue.control.puts import did_you_mean
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import InvalidInputError, InvalidTypeError

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = [
    "BatchMeta",
    "FieldMeta",
    "KVBatchMeta",
    "ProductionStatus",
    "SampleMeta",
    "describe_fields",
    "extract_field_schema",
]

log = logging.getLogger(__name__)
Entry: TypeAlias = dict[str, Any]
"""One field of ``BatchMeta.field_schema``: dtype, shape, is_nested, is_non_tensor and perhaps per_sample_shapes."""


class BatchMeta:
    """Rows of one or more partitions and what is known of their fields. Mutable, picklable, compared by identity.

    ``field_schema``: name -> ``{"dtype", "shape", "is_nested", "is_non_tensor"[, "per_sample_shapes"]}``; a shape is
    that of one row, ``(1,)`` for a 1-D column, None for non-tensors and for rows of differing shapes.
    ``production_status``: int8 ``(rows,)``, 1 where all fields are ready; zeros by default. ``custom_meta``: one dict
    (the tag) a row. Raises ValueError where lengths differ.

    ``BatchMeta(samples=[SampleMeta, ...], extra_info={})`` is the form of 0.1.5.
    """

    __slots__ = (
        "_backend_meta",
        "_located",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    global_indexes: list[int]
    partition_ids: list[str]
    field_schema: dict[str, Entry]
    production_status: npt.NDArray[np.int8]
    extra_info: dict[str, Any]
    custom_meta: list[dict[str, Any]]

    def __init__(
        self,
        global_indexes: Sequence[int] | Sequence[SampleMeta] = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Entry] | None = None,
        production_status: npt.ArrayLike | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[dict[str, Any]] | None = None,
        _custom_backend_meta: Sequence[dict[str, Any]] | None = None,
        *,
        samples: Sequence[SampleMeta] | None = None,
    ) -> None:
        for name, value in (("global_indexes", global_indexes), ("partition_ids", partition_ids)):
            if value is None or not hasattr(value, "__len__"):
                raise InvalidTypeError(f"{name} must be a list, not {type(value).__name__}")
        if field_schema is not None and not isinstance(field_schema, Mapping):
            raise InvalidTypeError(f"field_schema must be a dict, not {type(field_schema).__name__}")
        for name, entry in (field_schema or {}).items():
            if not isinstance(entry, Mapping):
                raise InvalidTypeError(f"field_schema of {name!r} must be a dict, not {type(entry).__name__}")
        if custom_meta is not None and not isinstance(custom_meta, Collection):
            raise InvalidTypeError(f"custom_meta must be a list of dicts, not {type(custom_meta).__name__}")
        given: Sequence[Any] = global_indexes if samples is None else samples
        if samples is not None or (len(given) and isinstance(given[0], SampleMeta)):
            if not all(isinstance(sample, SampleMeta) for sample in given):
                raise InvalidInputError("samples must all be SampleMeta")
            given, partition_ids, field_schema, production_status = _columns_of(given)
        count = len(given)
        self.global_indexes = list(given)
        self.partition_ids = list(partition_ids)
        self.field_schema = {name: dict(entry) for name, entry in (field_schema or {}).items()}
        try:
            status = np.zeros(count, np.int8) if production_status is None else np.array(production_status, np.int8)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"production_status must hold a number a row: {error}") from None
        self.production_status = status
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(tag) for tag in custom_meta] if custom_meta else [{} for _ in range(count)]
        self._backend_meta = [dict(meta) for meta in _custom_backend_meta] if _custom_backend_meta else None
        self._located: Batch | None = None  # where these rows lay when they were fetched; checked before it is used
        self._check_lengths()

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(None if name == "_located" else getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: Sequence[Any]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)
        self.production_status = np.array(self.production_status)  # arrays that come through Ray are read-only

    def _check_lengths(self) -> None:
        """One entry a row in every list. Raises InvalidInputError."""
        count = len(self.global_indexes)
        lengths = {
            "partition_ids": len(self.partition_ids),
            "custom_meta": len(self.custom_meta),
            "_custom_backend_meta": count if self._backend_meta is None else len(self._backend_meta),
        }
        for name, entry in self.field_schema.items():
            if entry.get("per_sample_shapes") is not None:
                lengths[f"per_sample_shapes of field {name!r}"] = len(entry["per_sample_shapes"])
        for what, length in lengths.items():
            if length != count:
                raise InvalidInputError(f"{what} has {length} entries for {count} global_indexes")
        if np.shape(self.production_status) != (count,):
            raise InvalidInputError(
                f"production_status has shape {np.shape(self.production_status)} for {count} global_indexes"
            )

    @property
    def _custom_backend_meta(self) -> list[dict[str, Any]]:
        """A dict a row for the backend, as 0.1.x names it; made when asked for, as the backends here need none."""
        if self._backend_meta is None:
            self._backend_meta = [{} for _ in self.global_indexes]
        return self._backend_meta

    @classmethod
    def from_samples(cls, samples: Sequence[SampleMeta], extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """The batch of these samples, in order (0.1.5)."""
        return cls(samples=samples, extra_info=extra_info)

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """A batch of no rows."""
        return cls(extra_info=extra_info)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Sorted names."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them are ready."""
        return len(self) > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> Sequence[Sample]:
        """The rows one by one, made when asked for."""
        return _Samples(self)

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The dtype of each row. Raises KeyError for an unknown field."""
        return [self._entry(field_name).get("dtype")] * len(self)

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of each row. Raises KeyError for an unknown field."""
        entry = self._entry(field_name)
        shapes = entry.get("per_sample_shapes")
        return [entry.get("shape")] * len(self) if shapes is None else list(shapes)

    def _entry(self, name: str) -> Entry:
        try:
            return self.field_schema[name]
        except KeyError:
            raise KeyError(f"field {name!r} is not in this batch, which has {self.field_names}") from None

    def __repr__(self) -> str:
        return (
            f"BatchMeta(size={len(self)}, partitions={sorted(set(self.partition_ids))}, fields={self.field_names}, "
            f"ready={int((self.production_status == 1).sum())})"
        )

    # --------------------------------------------------------------------------------------------- extra_info and tags

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        fields = ", ".join(
            f"{name} {entry.get('dtype')} {entry.get('shape')}" for name, entry in self.field_schema.items()
        )
        title = f"{self.size} rows, {int(self.production_status.sum())} ready: {fields or 'no fields'}"
        rows = zip(self.global_indexes, self.partition_ids, self.production_status, self.custom_meta, strict=True)
        cells = ((index, partition, "yes" if ready else "no", tag) for index, partition, ready, tag in rows)
        return html_table(title, ["row", "partition", "ready", "tag"], cells, self.size)

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """A value of ``extra_info``, or ``default``."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set a value of ``extra_info``."""
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Set several values of ``extra_info``."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """The removed value; None if there was none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Remove all of ``extra_info``."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether ``extra_info`` has a value ``key``."""
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy."""
        return copy.deepcopy(self.extra_info)

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[dict[str, Any] | None] | None) -> None:
        """Merge one dict into each row's; None changes nothing. Raises ValueError for another number of rows."""
        if custom_meta is None:
            return
        if len(custom_meta) != len(self):
            raise InvalidInputError(f"custom_meta has {len(custom_meta)} entries for {len(self)} rows")
        for new in custom_meta:
            if new is not None and not isinstance(new, Mapping):
                raise InvalidTypeError(f"custom_meta must be a list of dicts, not of {type(new).__name__}")
        for own, new in zip(self.custom_meta, custom_meta, strict=True):
            own.update(new or {})

    def clear_custom_meta(self) -> None:
        """Empty every row's dict here; the rows' tags in the queue stay."""
        self.custom_meta = [{} for _ in self.global_indexes]

    # ----------------------------------------------------------------------------------------------- rows and columns

    @overload
    def __getitem__(self, item: int) -> BatchMeta: ...
    @overload
    def __getitem__(self, item: slice) -> BatchMeta: ...
    def __getitem__(self, item: int | slice) -> BatchMeta:
        """One row or a slice of rows, as a batch. Raises IndexError, or TypeError for other indexes."""
        if isinstance(item, slice):
            return self._at(range(*item.indices(len(self))))
        if not isinstance(item, (int, np.integer)) or isinstance(item, bool):
            raise InvalidTypeError(f"a BatchMeta is indexed by integers or slices, not {type(item).__name__}")
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} is out of range for {len(self)} rows")
        return self._at([int(item) % len(self)])

    def _at(self, positions: Sequence[int]) -> BatchMeta:
        part = BatchMeta.__new__(BatchMeta)
        part.global_indexes = [self.global_indexes[position] for position in positions]
        part.partition_ids = [self.partition_ids[position] for position in positions]
        part.field_schema = {name: _entry_at(entry, positions) for name, entry in self.field_schema.items()}
        part.production_status = self.production_status[np.asarray(positions, np.intp)]
        part.extra_info = dict(self.extra_info)
        part.custom_meta = [dict(self.custom_meta[position]) for position in positions]
        backend = self._backend_meta
        part._backend_meta = None if backend is None else [dict(backend[position]) for position in positions]
        located = self._located
        fits = located is not None and len(located.indexes) == 8 * len(self)
        part._located = _located_at(located, positions) if located is not None and fits else None
        return part

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """The rows at these positions, repeats allowed, or where a mask of bools is True.

        A mask is a list, array or tensor with a bool for each row. Raises ValueError out of range, and for a mask of
        another length.
        """
        positions = as_positions("sample_indices", sample_indices, rows=len(self))
        if any(not 0 <= position < len(self) for position in positions):
            raise InvalidInputError(f"sample_indices must be within 0 to {len(self) - 1}")
        return self._at(positions)

    def select_fields(self, field_names: Iterable[str]) -> BatchMeta:
        """All rows with only these fields; unknown names are ignored, with a warning if they resemble a field."""
        field_names = list(field_names)
        unknown = [name for name in field_names if name not in self.field_schema]
        if hint := did_you_mean(unknown, self.field_schema):
            log.warning("select_fields: these rows have no fields %s%s", unknown, hint)
        part = self._at(range(len(self)))
        part.field_schema = {name: part.field_schema[name] for name in field_names if name in part.field_schema}
        return part

    def copy(self) -> BatchMeta:
        """A deep, independent copy."""
        return copy.deepcopy(self)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """``chunks`` parts of near-equal size, larger ones first; empty ones if there are fewer rows."""
        return [self._at(range(start, stop)) for start, stop in chunk_bounds(len(self), chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One batch a partition, in order of first appearance."""
        positions: dict[str, list[int]] = {}
        for position, partition in enumerate(self.partition_ids):
            positions.setdefault(partition, []).append(position)
        return [self._at(rows) for rows in positions.values()]

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the row at ``indices[i]`` at position i, in place. Raises ValueError unless it is a permutation."""
        positions = as_positions("indices", indices)
        if sorted(positions) != list(range(len(self))):
            raise InvalidInputError(f"indices must be a permutation of 0 to {len(self) - 1}")
        ordered = self._at(positions)
        for name in self.__slots__:
            if name != "extra_info":
                setattr(self, name, getattr(ordered, name))

    def add_fields(self, tensor_dict: TensorDictBase, set_all_ready: bool = True) -> BatchMeta:
        """Add or replace the schema of these fields, in place, and mark all rows ready.

        Raises ValueError for another batch size. An empty TensorDict changes nothing.
        """
        schema = extract_field_schema(tensor_dict)
        if not schema:
            return self
        rows = int(tensor_dict.batch_size[0]) if tensor_dict.batch_size else 0
        if rows != len(self):
            raise InvalidInputError(
                f"the batch size {rows} of the fields does not match the {len(self)} rows of the metadata"
            )
        self.field_schema.update(schema)
        if set_all_ready:
            self.production_status = np.ones(len(self), np.int8)
        return self

    # ------------------------------------------------------------------------------------------------------ combining

    def union(self, other: BatchMeta | None, validate: bool = True) -> BatchMeta:
        """The columns of both, for the same rows; ``other`` wins. A row is ready if it is in both.

        An empty or None side gives a copy of the other. Raises ValueError if the rows differ.
        """
        if other is not None and not isinstance(other, BatchMeta):
            raise InvalidTypeError(f"other must be a BatchMeta, not {type(other).__name__}")
        if other is None or not len(other):
            return self.copy()
        if not len(self):
            return other.copy()
        if validate or len(self) != len(other):
            if self.global_indexes != other.global_indexes:
                raise InvalidInputError("global_indexes do not match")
            if self.partition_ids != other.partition_ids:
                raise InvalidInputError("partition_ids do not match")
        merged, theirs = self.copy(), other.copy()
        merged.field_schema.update(theirs.field_schema)
        merged.extra_info.update(theirs.extra_info)
        merged.update_custom_meta(theirs.custom_meta)
        for own, new in zip(merged._custom_backend_meta, theirs._custom_backend_meta, strict=True):
            own.update(new)
        merged.production_status &= theirs.production_status
        return merged

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """All rows one after the other; empty parts are skipped.

        Parts whose rows differ in shape, or are nested, give a nested field with a shape a row. Raises ValueError for
        differing field names or dtypes, or conflicting ``extra_info``.
        """
        parts = [part for part in check_parts(data, cls) if len(part)]
        if not parts:
            return cls()
        if validate:
            for part in parts[1:]:
                _check_same_fields(parts[0], part)
            info = united_info([part.extra_info for part in parts])
        else:
            info = {key: value for part in parts for key, value in part.extra_info.items()}
        return cls(
            [index for part in parts for index in part.global_indexes],
            [partition for part in parts for partition in part.partition_ids],
            {
                name: _entry_of(parts, name)
                for name in parts[0].field_schema
                if all(name in p.field_schema for p in parts)
            },
            np.concatenate([part.production_status for part in parts]),
            info,
            [dict(tag) for part in parts for tag in part.custom_meta],
            [dict(meta) for part in parts for meta in part._custom_backend_meta],
        )


class _Samples(Sequence[Sample]):
    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    @overload
    def __getitem__(self, item: int) -> Sample: ...
    @overload
    def __getitem__(self, item: slice) -> list[Sample]: ...
    def __getitem__(self, item: int | slice) -> Sample | list[Sample]:
        if isinstance(item, slice):
            return [self[position] for position in range(*item.indices(len(self)))]
        batch = self._batch
        position = range(len(self))[item]
        status = int(batch.production_status[position])
        fields = {
            name: RowField(name, _row_entry(entry, position), ProductionStatus(status))
            for name, entry in batch.field_schema.items()
        }
        return Sample(
            batch.global_indexes[position],
            batch.partition_ids[position],
            status,
            MappingProxyType(batch.custom_meta[position]),
            MappingProxyType(fields),
            position,
        )


def _located_at(batch: Batch, positions: Sequence[int]) -> Batch:
    """The rows of ``batch`` at ``positions``, with nothing but their indexes and locations."""
    rows = np.asarray(positions, np.intp)
    return Batch(
        np.frombuffer(batch.indexes, "<i8")[rows].tobytes(),
        locations=[
            ColumnGroupLocations(
                family.fields,
                family.units,
                family.blocks,
                np.frombuffer(family.block_of_row, "<i4")[rows].tobytes(),
                np.frombuffer(family.row_in_block, "<i4")[rows].tobytes(),
            )
            for family in batch.locations
        ],
    )


def _entry_at(entry: Entry, positions: Sequence[int]) -> Entry:
    """A field's schema for the rows at ``positions``."""
    shapes = entry.get("per_sample_shapes")
    return dict(entry) if shapes is None else {**entry, "per_sample_shapes": [shapes[row] for row in positions]}


def _row_entry(entry: Entry, position: int) -> Entry:
    """A field's schema for one row, with the row's shape."""
    plain = {name: value for name, value in entry.items() if name != "per_sample_shapes"}
    shapes = entry.get("per_sample_shapes")
    return plain if shapes is None else {**plain, "shape": shapes[position]}


def _check_same_fields(first: BatchMeta, other: BatchMeta) -> None:
    if first.field_names != other.field_names:
        raise InvalidInputError(f"Field names do not match: {first.field_names} and {other.field_names}")
    for name, entry in first.field_schema.items():
        dtypes = entry.get("dtype"), other.field_schema[name].get("dtype")
        if not same_value(*dtypes):
            raise InvalidInputError(f"dtype of field {name!r} does not match: {dtypes[0]} and {dtypes[1]}")


def _entry_of(parts: Sequence[BatchMeta], name: str) -> Entry:
    """The schema of a field over several batches."""
    entries = [part.field_schema[name] for part in parts]
    entry = {key: value for key, value in entries[0].items() if key != "per_sample_shapes"}
    shapes = [shape for part in parts for shape in part.get_shapes(name)]
    nested = any(e.get("is_nested") for e in entries)
    if nested or (not entry.get("is_non_tensor") and any(shape != shapes[0] for shape in shapes)):
        entry |= {"is_nested": True, "shape": None, "per_sample_shapes": shapes}
    return entry


def _columns_of(samples: Sequence[SampleMeta]) -> tuple[list[int], list[str], dict[str, Entry], list[int]]:
    """Samples of 0.1.5 as indexes, partitions, field schema and production status."""
    schema: dict[str, Entry] = {}
    for position, sample in enumerate(samples):
        sample.__dict__["_batch_index"] = position
    for name in samples[0].fields if samples else ():
        if not all(name in sample.fields for sample in samples):
            continue
        fields = [sample.fields[name] for sample in samples]
        shapes = [item.shape for item in fields]
        entry = {"dtype": fields[0].dtype, "shape": shapes[0], "is_nested": False, "is_non_tensor": shapes[0] is None}
        if any(shape != shapes[0] for shape in shapes):
            entry |= {"is_nested": True, "shape": None, "per_sample_shapes": shapes}
        schema[name] = entry
    status = [int(sample.is_ready) for sample in samples]
    return [s.global_index for s in samples], [s.partition_id for s in samples], schema, status


def extract_field_schema(data: TensorDictBase) -> dict[str, Entry]:
    """The ``BatchMeta.field_schema`` of a batch whose first dimension is the rows."""
    from tensordict import TensorDictBase
    from torch import Tensor

    if not isinstance(data, TensorDictBase):
        raise InvalidTypeError(f"the fields must be a TensorDict, not {type(data).__name__}")
    schema: dict[str, Entry] = {}
    for name in data.keys():  # noqa: SIM118  a TensorDict iterates over rows
        value = data.get(name)
        if not isinstance(value, Tensor):
            schema[name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        elif value.is_nested:
            shapes = [tuple(row.shape) for row in value.unbind()]
            schema[name] = _nested_entry(value.dtype, shapes)
        else:
            schema[name] = _dense_entry(value.dtype, tuple(value.shape[1:]))
    return schema


def describe_fields(
    fields: Iterable[FieldSchema], rows: int, lengths: Mapping[str, bytes] | None = None
) -> dict[str, Entry]:
    """The ``BatchMeta.field_schema`` of what the controller knows of a batch of ``rows`` rows.

    ``lengths``: ragged field -> i32 bytes, elements along its first ragged axis. Imports torch for its dtypes.
    """
    import torch

    schema: dict[str, Entry] = {}
    for field in fields:
        if field.kind in ("text", "object") or field.shape is None:
            schema[field.name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        elif field.kind == "dense":
            schema[field.name] = _dense_entry(getattr(torch, field.dtype), tuple(size or 0 for size in field.shape))
        else:
            along = np.frombuffer((lengths or {}).get(field.name, b""), "<i4").tolist() or [None] * rows
            axis = field.shape.index(None)
            shapes = [(*field.shape[:axis], length, *field.shape[axis + 1 :]) for length in along]
            schema[field.name] = _nested_entry(getattr(torch, field.dtype), shapes)
    return schema


def _dense_entry(dtype: Any, shape: tuple[int, ...]) -> Entry:
    return {"dtype": dtype, "shape": shape or (1,), "is_nested": False, "is_non_tensor": False}


def _nested_entry(dtype: Any, shapes: Sequence[tuple[int | None, ...]]) -> Entry:
    return {"dtype": dtype, "shape": None, "is_nested": True, "is_non_tensor": False, "per_sample_shapes": list(shapes)}
