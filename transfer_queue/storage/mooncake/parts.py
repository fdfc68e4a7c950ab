"""Names of blocks in the store: ``tq/<run>/<block>``, and ``tq/<run>/<block>/<k>`` for the parts of a long one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Part", "block_key", "block_of", "parts_of", "prefix_of"]


class Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of a block under one key."""

    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def prefix_of(run: str) -> str:
    """What all keys of a run begin with; a shared master holds other keys as well."""
    return f"tq/{run}/"


def block_key(run: str, block: int) -> str:
    return f"tq/{run}/{block}"


def parts_of(run: str, block: int, nbytes: int, part_bytes: int) -> list[Part]:
    """Where a block of ``nbytes`` lies: one key if it is no longer than ``part_bytes``."""
    key = block_key(run, block)
    if nbytes <= part_bytes:
        return [Part(key, 0, nbytes)]
    starts = range(0, nbytes, part_bytes)
    return [Part(f"{key}/{k}", start, min(start + part_bytes, nbytes)) for k, start in enumerate(starts)]


def block_of(keys: Iterable[str], run: str) -> dict[str, int]:
    """key -> block, for those of ``keys`` that are blocks or parts of blocks of ``run``."""
    prefix = prefix_of(run)
    found = {}
    for key in keys:
        name = key.removeprefix(prefix).partition("/")[0]
        if key.startswith(prefix) and name.isascii() and name.isdigit():
            found[key] = int(name)
    return found
