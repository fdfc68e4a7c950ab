"""The plain store of a storage unit of 0.1.x, for programs that use it by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transfer_queue.errors import CapacityError, InvalidInputError, StorageKeyNotFoundError

__all__ = ["StorageUnitData"]


class StorageUnitData:
    """Values by field and row in a dictionary, at most ``storage_size`` rows. No server of this release uses it."""

    def __init__(self, storage_size: int | None = None) -> None:
        self.storage_size = storage_size
        self._rows: set[int] = set()
        self._fields: dict[str, dict[int, Any]] = {}

    def put_data(self, field_data: Mapping[str, Sequence[Any]], global_indexes: Sequence[int]) -> None:
        """Store one value a row. Raises InvalidInputError (a ValueError), and CapacityError; then nothing changed."""
        for name, values in field_data.items():
            if len(values) != len(global_indexes):
                raise InvalidInputError(
                    f"field_data: length mismatch: {len(values)} values of {name!r} for {len(global_indexes)} rows"
                )
        rows = self._rows.union(global_indexes)
        if self.storage_size is not None and len(rows) > self.storage_size:
            raise UnitCapacityError(f"global_indexes: {len(rows)} rows exceed the capacity of {self.storage_size} rows")
        self._rows = rows
        for name, values in field_data.items():
            self._fields.setdefault(name, {}).update(zip(global_indexes, values, strict=True))

    def get_data(self, fields: Sequence[str], global_indexes: Sequence[int]) -> dict[str, list[Any]]:
        """``{field: [value, ...]}`` in the order of ``global_indexes``.

        Raises InvalidInputError (a ValueError) for an unknown field, StorageKeyNotFoundError for a row without value.
        """
        found: dict[str, list[Any]] = {}
        for name in fields:
            if name not in self._fields:
                raise InvalidInputError(f"fields: {name!r} not found; there are {sorted(self._fields)}")
            values = self._fields[name]
            missing = [index for index in global_indexes if index not in values]
            if missing:
                raise StorageKeyNotFoundError(f"global_indexes {missing[:5]} not found in field {name!r}")
            found[name] = [values[index] for index in global_indexes]
        return found

    def clear(self, keys: Sequence[int]) -> None:
        """Forget rows; unknown ones are ignored."""
        self._rows.difference_update(keys)
        for values in self._fields.values():
            for index in keys:
                values.pop(index, None)


class UnitCapacityError(CapacityError, ValueError):
    """Both what 0.1.x raised here and what every other budget raises."""
