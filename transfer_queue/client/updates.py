"""``kv_update``: fields of a row as a function of what they were, atomically.

The fields are read with the blocks in which they lie, and written on condition that they still lie there. A caller
that finds them elsewhere has been overtaken. It waits in line with other callers for the same row, and reads again. So
some update of a row always succeeds, and nobody polls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transfer_queue.client.arguments import check_fields, check_keys, check_partition
from transfer_queue.client.kv import Cells
from transfer_queue.errors import InvalidInputError, InvalidTypeError

__all__ = ["Parser", "Update"]

Parser = Callable[[Any, Any], Any]


class Update:
    """A checked call of ``kv_update``."""

    def __init__(self, key: str, partition_id: str, fields: object, values: object, parser: object) -> None:
        if not callable(parser):
            raise InvalidTypeError(f"parser must be callable, not {type(parser).__name__}")
        self.key = check_keys([key])[0]
        self.partition = check_partition(partition_id)
        self.parser: Parser = parser
        self.new = _new_values(fields, values)
        self.names = list(self.new)
        self.line = f"\0kv_update\0{key}"
        """The name of the lock of those who were overtaken."""

    def changed(self, cells: Cells) -> dict[str, Any]:
        """What to write where the row has ``cells``. Raises InvalidInputError for a parser that returns nothing."""
        found = {name: self.parser(cells.values.get(name), new) for name, new in self.new.items()}
        if nothing := [name for name, value in found.items() if value is None]:
            raise InvalidInputError(
                f"parser {getattr(self.parser, '__qualname__', self.parser)} returned None for field {nothing[0]!r}, "
                "which would erase it; return what to store. Nothing has changed"
            )
        return found


def _new_values(fields: object, values: object) -> dict[str, Any]:
    if values is None:
        raise InvalidInputError("kv_update requires values: what the parser gets beside the old ones")
    if isinstance(fields, str):
        return {check_fields("fields", [fields])[0]: values}
    names = check_fields("fields", fields)
    if not names:
        raise InvalidInputError("fields is an empty list; name the fields to update")
    if not isinstance(values, Mapping):
        raise InvalidTypeError(f"values of several fields must be a mapping, not {type(values).__name__}")
    if {*values} != {*names}:
        raise InvalidInputError(f"fields and values must have the same columns, not {names} and {list(values)}")
    return {name: values[name] for name in names}
