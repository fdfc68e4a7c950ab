"""Blocking twins of ``async_`` functions and methods."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

from transfer_queue.errors import TransferQueueError

__all__ = ["blocking", "end_daemon_calls", "in_loop", "is_blocking", "on_loop"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_AWAITED = re.compile(r"await (\w+\.)async_")
_NAMED = re.compile(r"(?<=`)async_(?=\w+`)")


class _Mode(threading.local):
    blocking = False
    loop: asyncio.AbstractEventLoop | None = None
    """The loop that runs in the thread that called the twin."""


_mode = _Mode()
_exiting = False


def end_daemon_calls() -> None:
    """The program is at its end: calls of daemon threads that fail from now on end their threads without a traceback,
    as Python ends those threads a moment later."""
    global _exiting
    _exiting = True


_told: set[str] = set()
"""Names of the calls whose use in an event loop was logged."""


def in_loop() -> bool:
    """Whether an event loop runs in this thread, which a blocking call would block."""
    return asyncio._get_running_loop() is not None


def is_blocking() -> bool:
    """Whether the calling coroutine belongs to a blocking twin: it waits in its thread and never suspends."""
    # A user's parser may run a loop of its own within a twin, whose coroutines suspend.
    return _mode.blocking and asyncio._get_running_loop() is _mode.loop


@types.coroutine
def _suspended() -> Generator[None, None, None]:
    yield


async def on_loop() -> None:
    """Go on on the I/O loop, if this is still the thread of a blocking call; see ``client.operation.carry_out``."""
    if is_blocking():
        await _suspended()


def _warn(name: str, awaitable: str) -> None:
    """Once for each call. A cell of a notebook runs in a loop too, and may block it."""
    if name not in _told and "ipykernel" not in sys.modules:
        _told.add(name)
        log.warning("%s blocks the running event loop and all its tasks; use await %s", name, awaitable)


def blocking(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Derive the blocking twin of ``call``, an ``async_`` function of this package.

    The twin runs the coroutine of ``call`` in the calling thread. It has the signature of ``call``, and its docstring
    with names and examples of blocking calls.

    Args:
        call: A coroutine function that awaits nothing but ``AsyncClient.async_run`` and functions like itself.

    Returns:
        The blocking function.
    """

    @functools.wraps(call)
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            work = call(*args, **kwargs)
        except TypeError as error:  # of the arguments: nothing of the coroutine has run
            raise TypeError(str(error).replace(call.__qualname__, twin.__qualname__)) from None
        if in_loop():
            _warn(twin.__qualname__, call.__name__)
        before = _mode.blocking, _mode.loop
        _mode.blocking, _mode.loop = True, asyncio._get_running_loop()
        try:
            work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except TransferQueueError:
            if _exiting and threading.current_thread().daemon:
                raise SystemExit from None
            raise
        finally:
            _mode.blocking, _mode.loop = before
            work.close()
        raise AssertionError(f"{call.__qualname__} was suspended, so it has no blocking twin")

    twin.__name__ = call.__name__.removeprefix("async_")
    twin.__qualname__ = call.__qualname__.replace("async_", "").replace("AsyncClient.", "Client.")
    twin.__doc__ = _NAMED.sub("", _AWAITED.sub(r"\1", call.__doc__ or ""))
    return twin
