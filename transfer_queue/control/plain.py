"""Copies of plain data (what msgpack can carry): tags must not be shared with callers."""

from __future__ import annotations

from typing import Any

__all__ = ["copy_plain", "copy_tag"]

_SCALARS = frozenset({str, int, float, bool, type(None), bytes})


def copy_plain(value: Any) -> Any:
    """A deep copy of dicts, lists and tuples; other values are taken to be immutable."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, dict):
        return {key: copy_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(copy_plain(item) for item in value)
    return value


def copy_tag(tag: dict[str, Any]) -> dict[str, Any]:
    """`copy_plain` of one tag, quick for the flat ones."""
    copy = tag.copy()
    for key, value in tag.items():
        if type(value) not in _SCALARS:
            copy[key] = copy_plain(value)
    return copy
