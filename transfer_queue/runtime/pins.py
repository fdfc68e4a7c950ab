"""Blocks that must stay readable for a while though no row refers to them any more."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pins"]


class Pins:
    """``hold`` by some holder until ``release``; ``spare`` sorts out what may be freed at once."""

    def __init__(self) -> None:
        self._held: dict[Hashable, NDArray[np.uint64] | None] = {}
        self._deferred: set[tuple[int, int]] = set()

    def hold(self, holder: Hashable, blocks: NDArray[np.uint64] | None) -> None:
        """``blocks``: their ids in ascending order; None: all, until they are known."""
        self._held[holder] = blocks

    def holds(self, holder: Hashable) -> bool:
        """Whether ``holder`` has not released its blocks yet."""
        return holder in self._held

    def spare(self, unit: int, blocks: list[int]) -> list[int]:
        """Return the blocks among ``blocks`` that nobody holds; the last ``release`` returns the others."""
        kept = self._kept(blocks)
        self._deferred.update((unit, block) for block in kept)
        return [block for block in blocks if block not in kept] if kept else blocks

    def release(self, holder: Hashable) -> dict[int, list[int]]:
        """Unit -> blocks that should have been freed meanwhile and that nobody else holds."""
        self._held.pop(holder, None)
        kept = self._kept([block for _, block in self._deferred])
        found: dict[int, list[int]] = {}
        for unit, block in [pair for pair in self._deferred if pair[1] not in kept]:
            self._deferred.discard((unit, block))
            found.setdefault(unit, []).append(block)
        return found

    def _kept(self, blocks: list[int]) -> set[int]:
        """Those of ``blocks`` that somebody holds."""
        kept: set[int] = set()
        wanted = np.array(blocks if self._held else [], np.uint64)
        for held in self._held.values():
            if held is None:
                return set(blocks)
            if len(held):
                found = held[np.searchsorted(held, wanted).clip(0, len(held) - 1)] == wanted
                kept.update(wanted[found].tolist())
        return kept
