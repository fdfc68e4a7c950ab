"""Blocks that must stay readable for a while though no row refers to them any more."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["Pins"]


class Pins:
    """``hold`` by some holder until ``release``; ``spare`` sorts out what may be freed at once."""

    def __init__(self) -> None:
        self._held: dict[Hashable, set[tuple[int, int]]] = {}
        self._deferred: set[tuple[int, int]] = set()

    def hold(self, holder: Hashable, blocks: Iterable[tuple[int, int]]) -> None:
        """``blocks``: (unit, block)."""
        self._held[holder] = set(blocks)

    def spare(self, unit: int, blocks: list[int]) -> list[int]:
        """Return the blocks among ``blocks`` that nobody holds; the last ``release`` returns the others."""
        if not self._held:
            return blocks
        kept = {block for block in blocks if any((unit, block) in held for held in self._held.values())}
        self._deferred.update((unit, block) for block in kept)
        return [block for block in blocks if block not in kept]

    def release(self, holder: Hashable) -> dict[int, list[int]]:
        """Unit -> blocks that should have been freed meanwhile and that nobody else holds."""
        if self._held.pop(holder, None) is None:
            return {}
        found: dict[int, list[int]] = {}
        for pair in [pair for pair in self._deferred if not any(pair in held for held in self._held.values())]:
            self._deferred.discard(pair)
            found.setdefault(pair[0], []).append(pair[1])
        return found
