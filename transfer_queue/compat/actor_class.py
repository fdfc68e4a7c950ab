"""The actor classes of a queue in Ray: the ones that programs import, through which ``init()`` starts servers, too.

``options`` of either may be replaced on the object, as some programs do to place the servers; it holds for both.
"""

from __future__ import annotations

import importlib
from typing import Any

from transfer_queue.errors import InvalidTypeError, StartError

__all__ = ["ActorClass", "SimpleStorageUnit", "TransferQueueController"]


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
        return ray.remote(kind).options(**self._options).remote(*args, **kwargs)


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
