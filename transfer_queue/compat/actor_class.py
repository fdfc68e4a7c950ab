"""The actor classes of a queue in Ray: the ones that programs import, through which ``init()`` starts servers, too.

``options`` of either may be replaced on the object, as some programs do to place the servers; it holds for both.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidTypeError, StartError

__all__ = ["ActorClass", "SimpleStorageUnit", "TransferQueueController", "with_this_release"]

log = logging.getLogger(__name__)

_RELEASE = re.compile(r"transferqueue\s*([\[@=<>~!;(]|$)", re.IGNORECASE)
"""A requirement of the package that this one replaces."""


class _Configured:
    """The class with options. ``plan`` among the arguments of `remote`: ``init()`` makes the actor."""

    def __init__(self, kinds: ActorClass, options: dict[str, Any]) -> None:
        self._kinds = kinds
        self._options = options

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make an actor. Raises StartError without Ray."""
        try:
            import ray
        except ImportError:
            raise StartError("actors need Ray: pip install 'TransferQueue[ray]'") from None
        module, name = self._kinds.launched if "plan" in kwargs else self._kinds.own
        kind = getattr(importlib.import_module(module), name)
        return ray.remote(kind).options(**with_this_release(self._options)).remote(*args, **kwargs)


def with_this_release(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` whose ``runtime_env`` installs no release of this package: an actor that imports another one than the
    program that makes it cannot start. NeMo-RL asks for the release that it pins."""
    environment = dict(options.get("runtime_env") or {})
    for installer in ("pip", "uv"):
        given = environment.get(installer)
        packages = given.get("packages") if isinstance(given, Mapping) else given
        if not isinstance(packages, list):
            continue  # absent, or the path of a file
        kept = [package for package in packages if not _RELEASE.match(package.strip())]
        if kept == packages:
            continue
        left_out = ", ".join(package for package in packages if package not in kept)
        log.warning("runtime_env of a queue's actor: %s is not installed, as this release replaces it", left_out)
        if kept:
            environment[installer] = {**given, "packages": kept} if isinstance(given, Mapping) else kept
        else:
            del environment[installer]
    others = {name: value for name, value in options.items() if name != "runtime_env"}
    return {**others, "runtime_env": environment} if environment else others


class ActorClass:
    """A Ray actor class that needs Ray only when an actor is made.

    ``own``, ``launched``: (module, class) of what the actor is where a program makes it by itself, with the arguments
    of 0.1.x, and where ``init()`` does.
    """

    def __init__(self, name: str, own: tuple[str, str], launched: tuple[str, str]) -> None:
        self.__name__ = name
        self.own = own
        self.launched = launched

    def options(self, **options: Any) -> Any:
        """The class with Ray's options for its actors; one logical CPU each by default."""
        return _Configured(self, {"num_cpus": 1, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make an actor. Raises StartError without Ray."""
        return self.options().remote(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidTypeError(f"{self.__name__}: actors are made with .remote(), not by calling the class")


_LAUNCHED = "transfer_queue.launch.ray_actors"
_OWN = "transfer_queue.compat.actors"
TransferQueueController = ActorClass(
    "TransferQueueController", (_OWN, "ControllerHost"), (_LAUNCHED, "ControllerActor")
)
SimpleStorageUnit = ActorClass("SimpleStorageUnit", (_OWN, "StorageUnitHost"), (_LAUNCHED, "StorageUnitActor"))
