"""Backends by name. Built-in ones here, others through the entry-point group ``transfer_queue.backends``.

An entry point's value is a module with two functions::

    async def open_backend(context: BackendContext) -> Backend
    async def open_store(context: StoreContext) -> UnitStore

or, where the two sides have different dependencies, with the attributes ``CLIENT`` and ``UNIT`` naming a module each.
Modules are imported on first use only: a client never imports the unit side, a server never the client side.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Literal, cast

from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from transfer_queue.storage.base import Backend, BackendContext, StoreContext, UnitStore

__all__ = ["ENTRY_POINT_GROUP", "backend_names", "open_backend", "open_store"]

ENTRY_POINT_GROUP = "transfer_queue.backends"

_BUILT_IN = {
    "simple": ("transfer_queue.storage.memory.client", "transfer_queue.storage.memory.unit"),
    "mooncake": ("transfer_queue.storage.mooncake.client", "transfer_queue.storage.mooncake.unit"),
    "ray": ("transfer_queue.storage.ray.client", "transfer_queue.storage.ray.unit"),
}


def backend_names() -> list[str]:
    """Names that ``open_backend`` accepts, sorted."""
    found = {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(found | set(_BUILT_IN))


async def open_backend(kind: str, context: BackendContext) -> Backend:
    """The client side of backend ``kind``. Raises ConfigError for an unknown name."""
    return cast("Backend", await _side(kind, "CLIENT").open_backend(context))


async def open_store(kind: str, context: StoreContext) -> UnitStore:
    """The unit side of backend ``kind``. Raises ConfigError for an unknown name."""
    return cast("UnitStore", await _side(kind, "UNIT").open_store(context))


def _side(kind: str, side: Literal["CLIENT", "UNIT"]) -> ModuleType:
    if kind in _BUILT_IN:
        return importlib.import_module(_BUILT_IN[kind][side == "UNIT"])
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == kind:
            module = cast("ModuleType", point.load())
            other = getattr(module, side, None)
            return importlib.import_module(other) if other else module
    raise ConfigError(f"backend {kind!r} is not known; installed backends: {', '.join(backend_names())}")
