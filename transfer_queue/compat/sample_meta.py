"""Metadata of single samples: the classes of the 0.1.5 API and the rows that ``BatchMeta.samples`` shows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transfer_queue.errors import InvalidInputError

__all__ = ["FieldMeta", "ProductionStatus", "RowField", "Sample", "SampleMeta"]


class ProductionStatus(enum.IntEnum):
    """Whether a field of a sample can be read."""

    NOT_PRODUCED = 0
    READY_FOR_CONSUME = 1


@dataclass
class FieldMeta:
    """One field of one sample. ``shape`` is the row's shape, without the batch axis; ``()`` for a 1-D column."""

    name: str
    dtype: Any
    shape: Any
    production_status: ProductionStatus = ProductionStatus.NOT_PRODUCED

    @property
    def is_ready(self) -> bool:
        """Whether it can be read."""
        return self.production_status == ProductionStatus.READY_FOR_CONSUME


class RowField(FieldMeta, Mapping[str, Any]):
    """One field of one row of a ``BatchMeta``. It has attributes and, as in releases from 0.1.7 on, is a read-only
    mapping of ``"dtype"``, ``"shape"``, ``"is_nested"`` and ``"is_non_tensor"``."""

    def __init__(self, name: str, schema: Mapping[str, Any], production_status: ProductionStatus) -> None:
        super().__init__(name, schema.get("dtype"), schema.get("shape"), production_status)
        self._schema = schema

    def __getitem__(self, name: str) -> Any:
        return self._schema[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._schema)

    def __len__(self) -> int:
        return len(self._schema)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FieldMeta):
            return all(getattr(self, item.name) == getattr(other, item.name) for item in dataclasses.fields(FieldMeta))
        return Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class SampleMeta:
    """One sample: its partition, its global index and its fields by name."""

    partition_id: str
    global_index: int
    fields: dict[str, FieldMeta] = field(default_factory=dict)

    @property
    def batch_index(self) -> int:
        """Position in the batch that holds this sample; -1 outside a batch."""
        return int(self.__dict__.get("_batch_index", -1))

    @property
    def field_names(self) -> list[str]:
        """Names in the order in which they were added."""
        return list(self.fields)

    @property
    def is_ready(self) -> bool:
        """Whether all fields can be read."""
        return all(item.is_ready for item in self.fields.values())

    @property
    def production_status(self) -> dict[str, ProductionStatus]:
        """The status of each field."""
        return {name: item.production_status for name, item in self.fields.items()}

    def get_field_by_name(self, name: str) -> FieldMeta | None:
        """None for an unknown field."""
        return self.fields.get(name)

    def has_field(self, name: str) -> bool:
        """Whether the sample has the field, ready or not."""
        return name in self.fields

    def is_field_ready(self, field_name: str) -> bool:
        """False for unknown fields."""
        item = self.fields.get(field_name)
        return item is not None and item.is_ready

    def add_fields(self, fields: Mapping[str, FieldMeta]) -> SampleMeta:
        """Add or replace fields, in place."""
        self.fields = {**self.fields, **fields}
        return self

    def select_fields(self, field_names: Iterable[str]) -> SampleMeta:
        """A sample with only these fields; unknown names are ignored."""
        chosen = {name: self.fields[name] for name in field_names if name in self.fields}
        return SampleMeta(self.partition_id, self.global_index, chosen)

    def union(self, other: SampleMeta, validate: bool = True) -> SampleMeta:
        """Both samples' fields; ``other`` wins. Raises ValueError if they are different samples."""
        if validate and (self.global_index, self.partition_id) != (other.global_index, other.partition_id):
            raise InvalidInputError(
                f"global_index and partition_id do not match: {self.global_index} in {self.partition_id!r} against "
                f"{other.global_index} in {other.partition_id!r}"
            )
        return SampleMeta(self.partition_id, self.global_index, {**self.fields, **other.fields})


@dataclass(frozen=True)
class Sample:
    """One row of a ``BatchMeta``, read-only."""

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: MappingProxyType[str, Any]
    fields: MappingProxyType[str, RowField]
    batch_index: int

    @property
    def field_names(self) -> list[str]:
        """Names of the row's fields."""
        return list(self.fields)

    @property
    def is_ready(self) -> bool:
        """Whether all fields can be read."""
        return self.production_status == ProductionStatus.READY_FOR_CONSUME
