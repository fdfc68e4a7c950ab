"""Classes of tensordict, told without importing it: the import takes a second of processor time."""

from __future__ import annotations

import sys

__all__ = ["is_kind"]


def is_kind(value: object, name: str) -> bool:
    """Return whether ``value`` is an instance of ``tensordict.<name>``. It cannot be before somebody imports that."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, getattr(module, name, ()))
