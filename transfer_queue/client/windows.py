"""Blocks that are moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["windows"]

T = TypeVar("T")


def windows(items: Iterable[T], nbytes: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Divide ``items``, in their order, into lists of at most ``most`` items and ``most_bytes`` bytes, or of one item
    that is larger."""
    window: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if window and (len(window) >= most or total + size > most_bytes):
            yield window
            window, total = [], 0
        window.append(item)
        total += size
    if window:
        yield window
