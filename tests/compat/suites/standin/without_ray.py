"""A stand-in for the calls of Ray that clients' tests make: ``make compat ... COMPAT_ARGS=--without-ray``.

Nothing is started in a cluster: ``init()`` of this library starts local processes, and the controller's actor is its
calls, carried out by this process. Other actors and tasks are objects and calls of this process; their coroutines run
in a thread. A pytest plugin, and a program that runs a script. For machines where Ray is too slow.
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
from types import SimpleNamespace
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
    """The handle of an object."""

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
    """What ``ray.remote`` makes of a class or function."""

    def __init__(self, made: Callable[..., Any], name: str | None = None) -> None:
        self._made = made
        self._name = name
        self.__ray_metadata__ = SimpleNamespace(modified_class=made)

    def options(self, **kwargs: Any) -> _ActorClass:
        return _ActorClass(self._made, kwargs.get("name"))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._made, type):
            return _Actor(SimpleNamespace(call=self._made)).call.remote(*args, **kwargs)
        actor = _named.get(self._name) or _Actor(self._made(*args, **kwargs))
        if self._name:
            _named[self._name] = actor
        return actor


_named: dict[str | None, _Actor] = {}


def _remote(*args: Any, **kwargs: Any) -> Any:
    return _ActorClass(args[0]) if args else _ActorClass


def _get_actor(name: str, *args: Any, **kwargs: Any) -> Any:
    return _named.get(name) or _Controller()


def _get(value: Any, **kwargs: Any) -> Any:
    if isinstance(value, list):
        return [_get(item) for item in value]
    return value.result(600) if isinstance(value, Future) else value


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


ray.init = ray.shutdown = ray.kill = _nothing
ray.is_initialized = lambda: False
ray.get_actor = _get_actor
ray.get = _get
ray.put = lambda value, **kwargs: value
ray.remote = _remote
threading.Thread(target=_Actor.loop.run_forever, daemon=True).start()
for name in os.environ.get("TQ_SUITES_NOTHING", "").split():  # what else of the client needs a cluster
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    found = importlib.import_module(module)
    setattr(getattr(found, owner) if owner else found, attribute, _nothing)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
