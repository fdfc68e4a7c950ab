"""The keys of a partition, in a table that grows step by step: a dictionary copies all of its entries at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import contains, setitem

__all__ = ["KeyTable"]

_WHOLE = 1 << 15
"""Most keys of one dictionary: a few milliseconds to copy."""
_PARTS = 64
_PLACES = 4096
_PART_OF = [int(_PARTS * math.log2(1 + place / _PLACES)) for place in range(_PLACES)]
"""The part of a hash. The last part gets twice as many keys as the first, so that they do not grow at the same time."""


class KeyTable:
    """Key -> ordinal. Up to 32,768 keys are one dictionary, more are 64, by their hash. It has no order."""

    def __init__(self) -> None:
        self._parts: list[dict[str, int]] = [{}]
        self._at = self._parts  # by hash
        self._mask = 0

    def _parts_of(self, keys: Iterable[str]) -> Iterator[dict[str, int]]:
        return map(self._at.__getitem__, map(self._mask.__and__, map(hash, keys)))

    def get(self, key: str) -> int | None:
        return self._at[hash(key) & self._mask].get(key)

    def find(self, keys: Sequence[str], absent: int) -> list[int]:
        """The ordinals; ``absent`` for unknown keys."""
        return list(map(dict.get, self._parts_of(keys), keys, repeat(absent)))

    def is_disjoint(self, keys: Sequence[str]) -> bool:
        """Whether none of ``keys`` is there."""
        return not any(map(contains, self._parts_of(keys), keys))

    def add(self, keys: Sequence[str], ordinals: Iterable[int]) -> None:
        """Add keys that are new."""
        deque(map(setitem, self._parts_of(keys), keys, ordinals), 0)
        if self._mask == 0 and len(self._parts[0]) > _WHOLE:
            self._spread()

    def _spread(self) -> None:
        whole, self._parts = self._parts[0], [{} for _ in range(_PARTS)]
        self._at, self._mask = [self._parts[part] for part in _PART_OF], _PLACES - 1
        deque(map(setitem, self._parts_of(whole), whole, whole.values()), 0)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys that are there."""
        at, mask = self._at, self._mask
        for key in keys:
            del at[hash(key) & mask][key]

    def drop(self, most: int) -> bool:
        """Remove up to ``most`` entries, of a table that is not used any more. Whether there are others."""
        last = self._parts[-1]
        for _ in range(min(most, len(last))):
            last.popitem()
        if not last and len(self._parts) > 1:
            self._parts.pop().clear()  # its memory, too, goes now
        return bool(self._parts[-1]) or len(self._parts) > 1

    def items(self) -> Iterator[tuple[str, int]]:
        return chain.from_iterable(part.items() for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))
