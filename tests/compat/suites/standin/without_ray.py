"""A stand-in for the calls of Ray that clients' tests make: ``make compat ... COMPAT_ARGS=--without-ray``.

Nothing is started in a cluster: ``init()`` of this library starts local processes, and the controller's actor is its
calls, carried out by this process. A pytest plugin, and a program that runs a script. For machines where Ray is too
slow; it cannot stand in for actors and tasks of the client's own.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import ray

os.environ.setdefault("TQ_MISSING_FIELDS", "drop")  # as where a program has initialized Ray


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class _Controller:
    """The handle of the controller's actor."""

    def __getattr__(self, name: str) -> _Method:
        import transfer_queue as tq
        from transfer_queue.compat.controller_calls import ControllerCalls

        class Calls(ControllerCalls):
            def server_address(self) -> str:
                raise NotImplementedError("there is no actor")

            def _own_client(self) -> Any:
                return tq.get_client()

        return _Method(getattr(Calls(), name))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


ray.init = ray.shutdown = ray.kill = _nothing
ray.is_initialized = lambda: False
ray.get_actor = lambda *args, **kwargs: _Controller()
ray.get = lambda value, **kwargs: value
for name in os.environ.get("TQ_SUITES_NOTHING", "").split():  # what else of the client needs a cluster
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    found = importlib.import_module(module)
    setattr(getattr(found, owner) if owner else found, attribute, _nothing)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
