"""Plain data: what msgpack can carry."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["copy_plain", "pack_arrays", "unpack_arrays"]

_ARRAY = "\0ndarray"
"""The only key of a dict that encodes an array. Callers do not use this name."""
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


def pack_arrays(params: dict[str, Any]) -> dict[str, Any]:
    """Encode numeric arrays and tensors among the values as plain data."""
    return {name: _packed(value) for name, value in params.items()}


def _packed(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biuf":
        return {_ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
    return value


def unpack_arrays(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `pack_arrays`. Raises ValueError, TypeError for invalid data."""
    return {name: _unpacked(value) for name, value in params.items()}


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict) or _ARRAY not in value:
        return value
    dtype, shape, content = value[_ARRAY]
    return np.frombuffer(content, np.dtype(str(dtype))).reshape(shape).copy()
