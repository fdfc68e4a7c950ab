"""Who holds the memory of a storage unit: counts for the error of a put that finds no room."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Final

__all__ = ["Holders"]

_NAMED: Final = 3


class Holders:
    """Bytes and blocks by writer number."""

    def __init__(self) -> None:
        self._nbytes: Counter[int] = Counter()
        self._blocks: Counter[int] = Counter()
        self._names: dict[int, str] = {}

    def add(self, writer: int, nbytes: int, name: str) -> None:
        self._nbytes[writer] += nbytes
        self._blocks[writer] += 1
        self._names[writer] = name

    def remove(self, writer: int, nbytes: int) -> None:
        self._nbytes[writer] -= nbytes
        self._blocks[writer] -= 1
        if not self._blocks[writer]:
            del self._nbytes[writer], self._blocks[writer], self._names[writer]

    def describe(self, leased: int, readers: Iterable[str]) -> str:
        """The largest writers; with ``leased`` > 0 bytes of cleared rows, the ``readers`` that hold leases."""
        largest = heapq.nlargest(_NAMED, self._nbytes.items(), key=lambda item: item[1])
        held = [
            f"{self._names[writer]} wrote {nbytes} bytes in {self._blocks[writer]} blocks" for writer, nbytes in largest
        ]
        if len(self._nbytes) > _NAMED:
            held.append(f"{len(self._nbytes) - _NAMED} other clients the rest")
        if leased:
            names = sorted(set(readers))
            more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
            held.append(f"{leased} bytes are cleared rows still in use by {', '.join(names[:_NAMED])}{more}")
        return "; ".join(held) or "nobody holds any"
