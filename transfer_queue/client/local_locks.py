"""Locks of this process: names within a partition that one thread or asyncio task at a time holds, in order."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from transfer_queue.client.arguments import check_keys, check_partition
from transfer_queue.client.twins import in_loop
from transfer_queue.control.locks import Lines
from transfer_queue.errors import InvalidInputError, InvalidTypeError, RequestError, WaitTimeoutError

__all__ = [
    "Held",
    "async_kv_local_lock",
    "async_kv_local_locked",
    "async_lock_block",
    "check_lock",
    "kv_local_lock",
    "kv_local_locked",
    "lock_block",
]

P = ParamSpec("P")
T = TypeVar("T")
Block = TypeVar("Block", bound="AbstractContextManager[Any] | AbstractAsyncContextManager[Any]")


class _Lock(Generic[Block]):
    """What the call of a lock returns. It warns if nobody enters it, as nothing was locked then."""

    def __init__(self, usage: str, make: Callable[[], Block]) -> None:
        self._usage = usage
        self._make = make
        self._entered: Block | None = None

    def _enter(self) -> Block:
        if self._entered is not None:
            raise RequestError(f"this lock was entered before; make another call: {self._usage}")
        self._entered = self._make()
        return self._entered

    def __del__(self) -> None:
        if self._entered is None:
            warnings.warn(f"nothing was locked, as the lock was not entered; write {self._usage}", stacklevel=2)


class _BlockingLock(_Lock[AbstractContextManager[T]], AbstractContextManager[T]):
    def __enter__(self) -> T:
        return self._enter().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._entered is not None
        return self._entered.__exit__(kind, error, trace)


class _AsyncLock(_Lock[AbstractAsyncContextManager[T]], AbstractAsyncContextManager[T]):
    async def __aenter__(self) -> T:
        return await self._enter().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._entered is not None
        return await self._entered.__aexit__(kind, error, trace)


def lock_block(call: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """``contextmanager`` for a lock, which checks its arguments at once and warns if it is not entered."""
    make, expected = contextmanager(call), inspect.signature(call)

    @wraps(call)
    def lock(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        _check_arguments(call.__name__, expected, *args, **kwargs)
        return _BlockingLock(f"with {call.__name__}(...):", partial(make, *args, **kwargs))

    return lock


def async_lock_block(call: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
    """``asynccontextmanager`` for a lock, which checks its arguments at once and warns if it is not entered."""
    make, expected = asynccontextmanager(call), inspect.signature(call)

    @wraps(call)
    def lock(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        _check_arguments(call.__name__, expected, *args, **kwargs)
        return _AsyncLock(f"async with {call.__name__}(...):", partial(make, *args, **kwargs))

    return lock


def _check_arguments(name: str, expected: inspect.Signature, *args: Any, **kwargs: Any) -> None:
    try:
        given = expected.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    check_lock(given["keys"], given["partition_id"], given.get("timeout"))


class Held:
    """Which lock this thread or task is in. Tasks that begin within the block of a lock inherit that, until its end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._current: ContextVar[list[bool] | None] = ContextVar(kind, default=None)

    def check(self) -> None:
        """Raises RequestError, a RuntimeError, within the block of a lock of this kind."""
        current = self._current.get()
        if current is not None and current[0]:
            raise RequestError(
                f"Nested {self.kind}: locks that are taken one by one may wait for each other for ever; "
                "pass all keys to one call"
            )

    @contextmanager
    def block(self) -> Iterator[None]:
        self.check()
        inside = [True]
        self._current.set(inside)
        try:
            yield
        finally:
            inside[0] = False


def check_lock(keys: list[str] | str, partition_id: str, timeout: float | None, *, blocks: str = "") -> list[str]:
    """The keys, each once. ``blocks``: the name of the blocking call, which must not be made in a running loop."""
    if blocks and in_loop():
        raise RequestError(f"{blocks} would block the running event loop; use async_{blocks}")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
        raise InvalidInputError(f"timeout must be a number of seconds or None, not {timeout!r}")
    check_partition(partition_id)
    return list(dict.fromkeys(check_keys([keys] if isinstance(keys, str) else keys)))


class _Waiter:
    """``wake`` raises RuntimeError where the waiter's event loop is closed."""

    def __init__(self, names: list[tuple[str, str]], wake: Callable[[], None]) -> None:
        self.names = names
        self.wake = wake
        self.granted = False


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    loop.call_soon_threadsafe(woken.set)


class _LocalLocks:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._lines: Lines[_Waiter] = Lines()

    def join(self, waiter: _Waiter) -> bool:
        with self._guard:
            waiter.granted = self._lines.join(waiter, waiter.names)
            return waiter.granted

    def leave(self, waiter: _Waiter) -> None:
        """It holds or waits no more."""
        with self._guard:
            leaving = [waiter]
            while leaving:
                gone = leaving.pop()
                for follower in self._lines.leave(gone, gone.names):
                    if not follower.granted and self._lines.holds(follower, follower.names):
                        follower.granted = True
                        try:
                            follower.wake()
                        except RuntimeError:  # its loop is closed: nobody is there to hold the names
                            leaving.append(follower)


_locks = _LocalLocks()
_held = Held("kv_local_lock")


@lock_block
def kv_local_lock(keys: list[str] | str, partition_id: str, timeout: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``keys`` among the threads and asyncio tasks of this process, first come, first served.

    Calls of the key-value interface do not look at locks: only those who lock exclude each other. Other processes are
    excluded by ``kv_global_lock``.

    Args:
        keys: One or more names. They need not be keys of rows. All of them are taken at once.
        partition_id: The partition of these names.
        timeout: Seconds to wait for the lock. None: no limit.

    Yields:
        None, once the lock is held.

    Raises:
        WaitTimeoutError: A TimeoutError: not all keys were free in time.
        RequestError: A RuntimeError: this thread or task holds a local lock already, or an event loop runs in it.
        InvalidInputError, InvalidTypeError: An argument is wrong.

    Example:
        >>> with tq.kv_local_lock("counter", "train"):
        ...     count = tq.kv_batch_get("counter", "train")["n"][0]
        ...     meta = tq.kv_put("counter", "train", {"n": count + 1})
    """
    names = [(partition_id, key) for key in check_lock(keys, partition_id, timeout, blocks="kv_local_lock")]
    with _held.block():
        woken = threading.Event()
        waiter = _Waiter(names, woken.set)
        try:
            if not _locks.join(waiter):
                woken.wait(timeout)
            if not waiter.granted:
                raise WaitTimeoutError(f"Timeout: no local lock of {keys} in partition {partition_id!r} in {timeout} s")
            yield
        finally:
            _locks.leave(waiter)


@async_lock_block
async def async_kv_local_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None
) -> AsyncIterator[None]:
    """See ``kv_local_lock``; tasks of any event loop wait without blocking it."""
    names = [(partition_id, key) for key in check_lock(keys, partition_id, timeout)]
    with _held.block():
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        waiter = _Waiter(names, partial(_wake, loop, woken))
        try:
            if not _locks.join(waiter):
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(woken.wait(), timeout)
            if not waiter.granted:
                raise WaitTimeoutError(f"Timeout: no local lock of {keys} in partition {partition_id!r} in {timeout} s")
            yield
        finally:
            _locks.leave(waiter)


def kv_local_locked(
    fn: Callable[..., Any],
    keys: list[str] | str,
    partition_id: str,
    *,
    lock_timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """Return ``fn(keys, partition_id, **kwargs)``, called under ``kv_local_lock(keys, partition_id, lock_timeout)``.

    Args:
        fn: A call of the key-value interface, or a function of yours that reads, computes and writes.
        keys: Passed on, and locked.
        partition_id: Passed on; the partition of the lock.
        lock_timeout: Seconds to wait for the lock. None: no limit.
        **kwargs: Passed on.

    Returns:
        What ``fn`` returns.

    Raises:
        InvalidTypeError: ``fn`` is a coroutine function. What ``kv_local_lock`` and ``fn`` raise.

    Example:
        >>> meta = tq.kv_local_locked(tq.kv_batch_put, ["a", "b"], "train", tags=[{"n": 1}, {"n": 2}])
    """
    if inspect.iscoroutinefunction(fn):
        raise InvalidTypeError("fn is a coroutine function, which would run after the lock; use async_kv_local_locked")
    with kv_local_lock(keys, partition_id, lock_timeout):
        return fn(keys, partition_id, **kwargs)


async def async_kv_local_locked(
    fn: Callable[..., Awaitable[Any]],
    keys: list[str] | str,
    partition_id: str,
    *,
    lock_timeout: float | None = None,
    **kwargs: Any,
) -> Any:
    """See ``kv_local_locked``; ``fn`` is a coroutine function."""
    if not inspect.iscoroutinefunction(fn):
        raise InvalidTypeError("fn must be a coroutine function: another would block the event loop under the lock")
    async with async_kv_local_lock(keys, partition_id, lock_timeout):
        return await fn(keys, partition_id, **kwargs)


def _renew_in_child() -> None:
    global _locks, _held
    _locks, _held = _LocalLocks(), Held("kv_local_lock")


os.register_at_fork(after_in_child=_renew_in_child)
