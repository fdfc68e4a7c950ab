"""A stand-in for the calls of Ray that clients' tests make: ``make compat ... COMPAT_ARGS=--without-ray``.

Nothing is started in a cluster: ``init()`` of this library starts local processes, and the controller's actor is its
calls, carried out by this process. Actors whose class the script defines are objects in this process, their coroutines
run in a thread. A pytest plugin, and a program that runs a script. For machines where Ray is too slow; it cannot stand
in for actors and tasks of the client's own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import runpy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
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


class _Actor:
    """The handle of an object of the script's own class."""

    loop = asyncio.new_event_loop()

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> _Method:
        method = getattr(self._made, name)

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            if inspect.iscoroutinefunction(method):
                return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
            done: Future[Any] = Future()
            done.set_result(method(*args, **kwargs))
            return done

        return _Method(call)


class _ActorClass:
    def __init__(self, made: Callable[..., Any]) -> None:
        self._made = made

    def options(self, **kwargs: Any) -> _ActorClass:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> _Actor:
        return _Actor(self._made(*args, **kwargs))


def _remote(*args: Any, **kwargs: Any) -> Any:
    """Ray's own but for classes of the script."""

    def decorate(made: Any) -> Any:
        return _ActorClass(made) if getattr(made, "__module__", "") == "__main__" else _rays_remote(**kwargs)(made)

    if not args:
        return decorate
    return _ActorClass(args[0]) if getattr(args[0], "__module__", "") == "__main__" else _rays_remote(*args)


def _get(value: Any, **kwargs: Any) -> Any:
    if isinstance(value, list):
        return [_get(item) for item in value]
    return value.result(600) if isinstance(value, Future) else value


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


ray.init = ray.shutdown = ray.kill = _nothing
ray.is_initialized = lambda: False
ray.get_actor = lambda *args, **kwargs: _Controller()
ray.get = _get
_rays_remote, ray.remote = ray.remote, _remote
threading.Thread(target=_Actor.loop.run_forever, daemon=True).start()
for name in os.environ.get("TQ_SUITES_NOTHING", "").split():  # what else of the client needs a cluster
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    found = importlib.import_module(module)
    setattr(getattr(found, owner) if owner else found, attribute, _nothing)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
