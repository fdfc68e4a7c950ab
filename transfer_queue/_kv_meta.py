"""What the key-value interface returns for a batch of keys."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from transfer_queue._html import html_table
from transfer_queue.errors import InvalidInputError, InvalidTypeError, RequestError

__all__ = [
    "KVBatchMeta",
    "as_positions",
    "check_parts",
    "chunk_bounds",
    "is_bool",
    "repeated",
    "same_value",
    "united_info",
    "whole_number",
]

T = TypeVar("T")

_SCALARS: Final = frozenset({str, int, float, bool, bytes, type(None)})


@dataclass
class KVBatchMeta:
    """Keys of one partition with their tags.

    ``fields``: the fields ready for all keys. Tags and ``extra_info`` are copied deeply. Raises ValueError if keys and
    tags differ in length, or keys or fields repeat.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (
            ("keys", self.keys),
            ("tags", self.tags),
            ("fields", [] if self.fields is None else self.fields),
        ):
            if isinstance(value, str) or not isinstance(value, Collection):
                raise InvalidTypeError(f"{name} must be a list, not {value!r:.80}")
        if len(self.keys) != len(self.tags):
            raise InvalidInputError(
                f"keys and tags must have same length, got {len(self.keys)} keys, {len(self.tags)} tags"
            )
        if len(set(self.keys)) != len(self.keys):
            raise InvalidInputError(f"Got duplicated keys: {repeated(self.keys)}")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise InvalidInputError(f"Got duplicated fields: {repeated(self.fields)}")
        self.tags = [_copied(tag) for tag in self.tags] if any(self.tags) else [{} for _ in self.tags]
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        fields = ", ".join(self.fields or ()) or "no fields"
        title = f"{len(self.keys)} keys of partition {self.partition_id} with {fields}"
        return html_table(title, ["key", "tag"], zip(self.keys, self.tags, strict=True), len(self.keys))

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        """The given keys, in the given order. Raises ValueError for repeats, RuntimeError for unknown keys."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise InvalidInputError(f"Contain duplicate keys: {repeated(keys_to_select)}")
        positions = {key: position for position, key in enumerate(self.keys)}
        missing = [key for key in keys_to_select if key not in positions]
        if missing:
            raise RequestError(f"keys {missing} not found in current batch")
        return self._at([positions[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """Put the key at ``indexes[i]`` at position i, in place. Raises ValueError unless it is a permutation."""
        positions = as_positions("indexes", indexes)
        if len(positions) != len(self.keys):
            raise InvalidInputError(f"the number of indexes {len(positions)} does not match the {len(self.keys)} keys")
        if len(set(positions)) != len(positions):
            raise InvalidInputError("Contain duplicate indexes")
        if set(positions) != set(range(len(self.keys))):
            raise InvalidInputError(f"indexes must be 0 to {len(self.keys) - 1}")
        self.keys = [self.keys[position] for position in positions]
        self.tags = [self.tags[position] for position in positions]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """``chunks`` parts of near-equal size, larger ones first; empty ones if there are fewer keys."""
        return [self._at(range(start, stop)) for start, stop in chunk_bounds(len(self.keys), chunks)]

    def _at(self, positions: Sequence[int]) -> KVBatchMeta:
        return KVBatchMeta(
            keys=[self.keys[position] for position in positions],
            tags=[self.tags[position] for position in positions],
            partition_id=self.partition_id,
            fields=None if self.fields is None else list(self.fields),
            extra_info=self.extra_info,
        )

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """All keys one after the other; empty parts are skipped.

        Raises ValueError for differing partitions or fields, repeated keys, or conflicting ``extra_info``.
        """
        parts = [part for part in check_parts(data, cls) if len(part)]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts[1:]:
            if part.partition_id != first.partition_id:
                raise InvalidInputError(f"Partition do not match: {first.partition_id!r} and {part.partition_id!r}")
            if part.fields is not None and sorted(part.fields) != sorted(first.fields or []):
                raise InvalidInputError(f"Field names do not match: {first.fields} and {part.fields}")
        keys = [key for part in parts for key in part.keys]
        if len(set(keys)) != len(keys):
            raise InvalidInputError(f"Got duplicated keys: {repeated(keys)}")
        return cls(
            keys=keys,
            tags=[tag for part in parts for tag in part.tags],
            partition_id=first.partition_id,
            fields=None if first.fields is None else list(first.fields),
            extra_info=united_info([part.extra_info or {} for part in parts]),
        )


def repeated(names: Sequence[str]) -> list[str]:
    """Names that are there more than once, in order of first appearance."""
    return [name for name, count in Counter(names).items() if count > 1]


def is_bool(value: object) -> bool:
    """Whether a value, or each element of an array or tensor, is a truth value; Python counts these as ints."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def whole_number(name: str, value: object) -> int:
    """A whole number, numpy's and torch's too, and no truth value. Raises InvalidTypeError."""
    try:
        if not is_bool(value):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise InvalidTypeError(f"{name} must be an int, not {type(value).__name__}")


def as_positions(name: str, given: Sequence[int], rows: int | None = None) -> list[int]:
    """Whole numbers, numpy's and torch's too. With ``rows`` also a mask: the positions where it is True.

    Raises InvalidTypeError; InvalidInputError for a mask of another length than ``rows``.
    """
    try:
        positions = list(given)
        flags = [is_bool(position) for position in positions]
        if not any(flags):
            return [operator.index(position) for position in positions]
    except TypeError:
        raise InvalidTypeError(f"{name} must be a list of ints, not {given!r:.80}") from None
    if rows is None or not all(flags) or any(getattr(position, "shape", ()) for position in positions):
        raise InvalidTypeError(f"{name} must be a list of ints, not of bools: {given!r:.80}")
    if len(positions) != rows:
        raise InvalidInputError(f"{name} is a mask of {len(positions)} entries for {rows} rows")
    return [position for position, picked in enumerate(positions) if picked]


def check_parts(data: Sequence[T], kind: type[T]) -> Sequence[T]:
    """What ``concat`` is given. Raises InvalidTypeError."""
    if not isinstance(data, Iterable) or isinstance(data, kind):
        raise InvalidTypeError(f"data must be a list of {kind.__name__}, not {type(data).__name__}")
    parts = list(data)
    for part in parts:
        if not isinstance(part, kind):
            raise InvalidTypeError(f"data must be a list of {kind.__name__}, not of {type(part).__name__}")
    return parts


def chunk_bounds(count: int, chunks: int) -> list[tuple[int, int]]:
    """Bounds of ``chunks`` near-equal parts of ``count`` rows, larger ones first. Raises ValueError below 1 chunk."""
    chunks = whole_number("chunks", chunks)
    if chunks < 1:
        raise InvalidInputError(f"chunks must be at least 1, not {chunks}")
    size, larger = divmod(count, chunks)
    starts = [number * size + min(number, larger) for number in range(chunks + 1)]
    return list(itertools.pairwise(starts))


def united_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All entries of ``infos``. Raises ValueError for an entry with conflicting values."""
    united: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in united and not same_value(united[key], value):
                raise InvalidInputError(f"conflicting values of extra_info {key!r}: {united[key]!r} and {value!r}")
            united[key] = value
    return united


def same_value(left: Any, right: Any) -> bool:
    """Equality that also holds for arrays and tensors: of one shape, with equal elements."""
    if left is right:
        return True
    if hasattr(left, "shape") or hasattr(right, "shape"):
        shapes = getattr(left, "shape", None), getattr(right, "shape", None)
        return shapes[0] == shapes[1] and bool((left == right).all())
    return bool(left == right)


def _copied(tag: dict[str, Any]) -> dict[str, Any]:
    """A deep copy; that of a flat tag, which nearly all are, at a tenth of the cost."""
    if type(tag) is dict and _SCALARS.issuperset(map(type, tag.values())):
        return tag.copy()
    return copy.deepcopy(tag)
