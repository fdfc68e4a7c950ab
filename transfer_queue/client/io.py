"""The library's own threads: one that runs the I/O loop, one for long copies. Callers' loops and threads only wait.

So put and get proceed while the caller computes, and one client serves any number of loops and threads.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import importlib
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from transfer_queue.errors import WaitTimeoutError
from transfer_queue.runtime.process import new_event_loop

__all__ = ["ForkHandler", "IoThread", "close_in_forked_children", "shared_io"]

T = TypeVar("T")

_REST_S = 2.0
_io_threads: weakref.WeakSet[IoThread] = weakref.WeakSet()
_exiting = False


class IoThread:
    """An event loop in a daemon thread, started at construction.

    At the end of the program the loop rests, but for calls of other exit handlers: an event that uvloop takes after
    Python has freed its interpreter would end the process with a segmentation fault.
    """

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._worker: _Worker | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._returns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Returns] = weakref.WeakKeyDictionary()
        self._late_lock = threading.Lock()
        self._late_calls = 0
        self._resume: threading.Event | None = None  # while the loop rests
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tq-io", daemon=True)
        self._thread.start()
        started.wait()
        _io_threads.add(self)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait(
        self,
        work: Coroutine[Any, Any, T],
        timeout_s: float | None = None,
        unwanted: Callable[[asyncio.Task[T]], None] | None = None,
    ) -> T:
        """Run ``work`` on the loop and block the calling thread for its result.

        The work bounds itself; ``timeout_s`` is a second bound in case the loop itself hangs. An interrupt (Ctrl-C)
        cancels the work, and ``unwanted`` is called with it, on the loop, once it has ended. Raises what the work
        raised, WaitTimeoutError.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call inside the I/O thread would wait for itself")
        if _exiting:
            with self._awake():
                return self._wait(work, timeout_s, unwanted)
        return self._wait(work, timeout_s, unwanted)

    def _wait(
        self,
        work: Coroutine[Any, Any, T],
        timeout_s: float | None,
        unwanted: Callable[[asyncio.Task[T]], None] | None,
    ) -> T:
        outcome = _Outcome()
        outcome.done.acquire()
        self.loop.call_soon_threadsafe(self._start, work, outcome, outcome.finished)
        try:
            if not outcome.done.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise WaitTimeoutError(f"no result within {timeout_s:g} s; the I/O thread does not get to run")
        except BaseException:
            outcome.cancel(self.loop, unwanted)
            raise
        return outcome.result()  # type: ignore[no-any-return]

    async def run(self, work: Coroutine[Any, Any, T], unwanted: Callable[[asyncio.Task[T]], None] | None = None) -> T:
        """Await ``work`` from any event loop; it runs on this one. Cancelling cancels it; see ``wait``."""
        if _exiting:
            with self._awake():
                return await self._run_for_loop(work, unwanted)
        return await self._run_for_loop(work, unwanted)

    async def _run_for_loop(
        self, work: Coroutine[Any, Any, T], unwanted: Callable[[asyncio.Task[T]], None] | None
    ) -> T:
        caller = asyncio.get_running_loop()
        returns = self._returns.get(caller)
        if returns is None:
            returns = self._returns.setdefault(caller, _Returns(caller))
        future: asyncio.Future[T] = caller.create_future()
        outcome = _Outcome()
        self.loop.call_soon_threadsafe(self._start, work, outcome, lambda task: returns.add(future, task))
        try:
            return await future
        except asyncio.CancelledError:
            outcome.cancel(self.loop, unwanted)
            raise

    async def run_copy(self, function: Callable[[], T]) -> T:
        """Run a long copy on the worker thread. The copy itself cannot be cancelled: cancellation waits for its end,
        since its memory must stay valid until then."""
        if self._worker is None:
            self._worker = _Worker()
        future = asyncio.wrap_future(self._worker.submit(function))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the threads. Idempotent."""
        if self._thread.is_alive():
            with self._late_lock:
                self._go_on()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def rest(self) -> None:
        """Keep the loop from taking events until a call comes; returns once it does."""
        with self._late_lock:
            if self._resume is None and not self._late_calls and self._thread.is_alive():
                resting, self._resume = threading.Event(), threading.Event()
                with contextlib.suppress(RuntimeError):  # closed
                    # In the turn after the next: uvloop sends what callbacks write at the end of their turn.
                    self.loop.call_soon_threadsafe(self.loop.call_soon, self._rest, resting, self._resume)
                    resting.wait(_REST_S)

    @staticmethod
    def _rest(resting: threading.Event, resume: threading.Event) -> None:
        resting.set()
        resume.wait()  # at the end of the program for good: Python ends the thread as soon as it asks for the GIL

    def _go_on(self) -> None:
        if self._resume is not None:
            self._resume.set()
            self._resume = None

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """For a call at the end of the program."""
        with self._late_lock:
            self._late_calls += 1
            self._go_on()
        try:
            yield
        finally:
            with self._late_lock:
                self._late_calls -= 1
            self.rest()

    def _start(
        self, work: Coroutine[Any, Any, Any], outcome: _Outcome, finished: Callable[[asyncio.Task[Any]], None]
    ) -> None:
        task = self.loop.create_task(work)
        outcome.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(finished)  # last: the woken thread needs the GIL

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(started.set)
        try:
            self.loop.run_forever()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
        finally:
            self.loop.close()


class _Worker:
    """One daemon thread for functions in turn. Unlike an executor's it serves until the process is gone: clients that
    close at its end have copies to finish, and memory to give back."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="tq-copy", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work.put((future, function))
        return future

    def stop(self) -> None:
        """End after what was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._carry_out(*item)
            del item  # what it refers to need not live until the next one comes

    @staticmethod
    def _carry_out(future: concurrent.futures.Future[Any], function: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                future.set_exception(error)


class _Outcome:
    """Hands a task's result to a blocked thread; a bare lock is the cheapest way to wake one."""

    __slots__ = ("done", "task")

    def __init__(self) -> None:
        self.done = threading.Lock()
        self.task: asyncio.Task[Any] | None = None

    def finished(self, task: asyncio.Task[Any]) -> None:
        self.done.release()

    def result(self) -> Any:
        assert self.task is not None
        return self.task.result()

    def cancel(self, loop: asyncio.AbstractEventLoop, unwanted: Callable[[asyncio.Task[Any]], None] | None) -> None:
        def cancel() -> None:
            if self.task is not None:
                self.task.cancel()
                if unwanted is not None:
                    self.task.add_done_callback(unwanted)

        loop.call_soon_threadsafe(cancel)


class _Returns:
    """Results on their way to one caller's loop: each wake-up of it, which is a system call, carries all there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._done: deque[tuple[asyncio.Future[Any], asyncio.Task[Any]]] = deque()
        self._called = False

    def add(self, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        """Add the result of a task. Called in the I/O thread."""
        self._done.append((future, task))
        loop = self._loop()
        if not self._called and loop is not None:
            self._called = True
            with contextlib.suppress(RuntimeError):  # closed: no caller waits there
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # first: what is added from now on calls again
        while self._done:
            future, task = self._done.popleft()
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                if not future.done():
                    future.set_exception(error)
            elif not future.done():
                future.set_result(task.result())


class ForkHandler(Protocol):
    """An object with sockets and locks that a forked child must not keep."""

    def descriptors(self) -> list[int]: ...

    def abandon_in_child(self) -> None: ...


_shared: IoThread | None = None
_shared_lock = threading.Lock()
_fork_handlers: weakref.WeakSet[ForkHandler] = weakref.WeakSet()
_abandoned: list[object] = []


def shared_io() -> IoThread:
    """The I/O thread of this process, started on first use."""
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.alive:
            _shared = IoThread()
        return _shared


def _rest_at_exit() -> None:
    global _exiting
    _exiting = True
    for thread in list(_io_threads):
        thread.rest()


def close_in_forked_children(handler: ForkHandler) -> None:
    """Weakly remember ``handler``: a child keeps none of its descriptors, so that servers see the parent's end."""
    _fork_handlers.add(handler)


def _after_fork_in_child() -> None:
    global _shared, _shared_lock
    _shared_lock = threading.Lock()
    _io_threads.clear()
    # Kept alive for good: their clean-up would act on descriptors that are closed here and may be others' by then.
    _abandoned.extend([_shared, *_fork_handlers])
    _shared = None
    for handler in list(_fork_handlers):
        handler.abandon_in_child()
        for descriptor in handler.descriptors():
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _fork_handlers.clear()


def _finish_imports() -> None:
    """Wait for what other threads import of this package: it is imported as it is needed, and a child in which such a
    thread is gone would wait for the lock of its module for ever."""
    seen: set[str] = set()
    while found := {name for name in list(sys.modules) if name.startswith("transfer_queue.")} - seen:
        for name in found:
            with contextlib.suppress(ImportError):  # raised where it is imported
                importlib.import_module(name)
        seen |= found


os.register_at_fork(before=_finish_imports, after_in_child=_after_fork_in_child)
atexit.register(_rest_at_exit)
