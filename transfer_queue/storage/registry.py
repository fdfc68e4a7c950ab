"""Backends by name. Built-in ones here, others through the entry-point group ``transfer_queue.backends``.

An entry point's value is a module with two functions::

    async def open_backend(context: BackendContext) -> Backend
    async def open_store(context: StoreContext) -> UnitStore

or, where the two sides have different dependencies, with the attributes ``CLIENT`` and ``UNIT`` naming a module each.
Modules are imported on first use only: a client never imports the unit side, a server never the client side.

A backend that needs servers of its own names a third module, ``TESTING``, for the conformance suite::

    def servers(directory: Path) -> ContextManager[dict[str, Any]]

starts them, with their files in ``directory``, and gives the backend's settings.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from transfer_queue.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType

    from transfer_queue.storage.base import Backend, BackendContext, StoreContext, UnitStore

__all__ = ["ENTRY_POINT_GROUP", "backend_names", "backend_servers", "open_backend", "open_store", "packaged_backends"]

ENTRY_POINT_GROUP = "transfer_queue.backends"

_Side = Literal["CLIENT", "UNIT", "TESTING"]

_BUILT_IN: dict[str, dict[_Side, str]] = {
    "simple": {
        "CLIENT": "transfer_queue.storage.memory.client",
        "UNIT": "transfer_queue.storage.memory.unit",
    },
    "mooncake": {
        "CLIENT": "transfer_queue.storage.mooncake.client",
        "UNIT": "transfer_queue.storage.mooncake.unit",
        "TESTING": "transfer_queue.storage.mooncake.testing",
    },
    "registered": {
        "CLIENT": "transfer_queue.compat.registered.client",
        "UNIT": "transfer_queue.compat.registered.unit",
    },
    "ray": {
        "CLIENT": "transfer_queue.storage.ray.client",
        "UNIT": "transfer_queue.storage.ray.unit",
        "TESTING": "transfer_queue.storage.ray.testing",
    },
    "yuanrong": {
        "CLIENT": "transfer_queue.storage.yuanrong.client",
        "UNIT": "transfer_queue.storage.yuanrong.unit",
        "TESTING": "transfer_queue.storage.yuanrong.testing",
    },
}


def backend_names() -> list[str]:
    """Names that a queue may choose, sorted; without ``registered``, which stands for managers of programs' own."""
    return sorted(packaged_backends() | set(_BUILT_IN) - {"registered"})


def packaged_backends() -> set[str]:
    """Names of the backends that installed packages bring; those of built-in ones cannot be taken."""
    return {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)} - set(_BUILT_IN)


async def open_backend(kind: str, context: BackendContext) -> Backend:
    """The client side of backend ``kind``. Raises ConfigError for an unknown name."""
    return cast("Backend", await _side(kind, "CLIENT").open_backend(context))


async def open_store(kind: str, context: StoreContext) -> UnitStore:
    """The unit side of backend ``kind``. Raises ConfigError for an unknown name."""
    return cast("UnitStore", await _side(kind, "UNIT").open_store(context))


def backend_servers(kind: str, directory: Path) -> AbstractContextManager[dict[str, Any]]:
    """Run what backend ``kind`` needs besides its units on this host for the time of a ``with`` block; gives the
    settings. Raises ConfigError for an unknown name."""
    module = _side(kind, "TESTING")
    servers = getattr(module, "servers", None)
    return nullcontext({}) if servers is None else cast("AbstractContextManager[dict[str, Any]]", servers(directory))


def _side(kind: str, side: _Side) -> ModuleType:
    if kind in _BUILT_IN:
        modules = _BUILT_IN[kind]
        return importlib.import_module(modules.get(side, modules["CLIENT"]))
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == kind:
            module = _load(point)
            other = getattr(module, side, None)
            return importlib.import_module(other) if other else module
    raise ConfigError(
        f"backend {kind!r} is not known; installed backends: {', '.join(backend_names())}. A package that provides one "
        f"registers it in the entry-point group {ENTRY_POINT_GROUP} and is installed beside transfer_queue"
    )


def _load(point: importlib.metadata.EntryPoint) -> ModuleType:
    try:
        return cast("ModuleType", point.load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"backend {point.name!r} ({point.value}) does not load: {error}") from error
