"""Life of a server process: settings, READY line, signals, one-line errors."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from transfer_queue._printable import printable
from transfer_queue.config.document import Document, load_document
from transfer_queue.config.trouble import Trouble, write_trouble
from transfer_queue.config.variables import event_loop
from transfer_queue.errors import ConfigError, TransferQueueError

__all__ = ["allow_descriptors", "announce_ready", "new_event_loop", "note_lost_parent", "run_process"]

D = TypeVar("D", bound=Document)
_M_MMAP_THRESHOLD = -3
_MAPPED = 1 << 20
"""Buffers of at least this size are mapped, and returned to the system when they are freed. By default glibc raises its
threshold with each such buffer and keeps the memory of all later ones."""
_GC_THRESHOLD = (50_000, 20, 100)
"""Servers hold many objects that live long and make few cycles, so they are looked through less often than by default
(every 700 new ones)."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if it is installed (and ``TQ_EVENT_LOOP`` does not say ``asyncio``), else asyncio's.

    Raises ConfigError.
    """
    if event_loop() == "uvloop":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
            return loop
    return asyncio.new_event_loop()


def allow_descriptors() -> int:
    """Let this process have as many open files as it may: each connection is one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _return_memory() -> None:
    """Return freed buffers to the system at once, if the C library supports it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)


def announce_ready(**facts: Any) -> None:
    """Print the one line on stdout that tells a launcher where this process serves."""
    print("READY " + json.dumps({**facts, "pid": os.getpid()}), flush=True)


def run_process(model: type[D], main: Callable[[D, asyncio.Event, str], Awaitable[None]], prog: str) -> int:
    """Run ``main(settings, stop, path)`` until SIGTERM, SIGINT, or with ``--die-with-parent`` end of file on stdin.

    ``path`` is the file of the settings.
    Returns the exit code; an expected fault is one line on stderr and code 1. With ``--die-with-parent`` it is
    also written to stdout for the parent.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("--config", required=True, help="YAML or JSON file of settings")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input reaches its end")
    arguments = parser.parse_args()
    if arguments.die_with_parent and sys.stdin is None:  # from here on 0 would be the number of another file
        print("error: --die-with-parent: standard input is closed; the parent must hold a pipe to it", file=sys.stderr)
        return 1
    allow_descriptors()
    _return_memory()
    try:
        loop = new_event_loop()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    loop.set_exception_handler(_handle)
    stop = asyncio.Event()
    try:
        settings = load_document(model, arguments.config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if arguments.die_with_parent:
            _watch_stdin(loop, stop)
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        loop.run_until_complete(main(settings, stop, arguments.config))
    except TransferQueueError as error:
        if arguments.die_with_parent:  # its log may be on the full disk
            print("ENDED " + json.dumps({"error": str(error)}), flush=True)
        with suppress(OSError):
            print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    finally:
        _end_tasks(loop)
        loop.close()
    return 0


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End at once when memory is exhausted: a change may be half done, and must not be acknowledged or
    written down."""
    if isinstance(context.get("exception"), MemoryError):
        os.write(2, b"error: out of memory: give this process more, or keep fewer rows\n")
        os._exit(1)
    loop.default_exception_handler(context)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    # Again and again: up to Python 3.11 wait_for loses a cancellation that meets the end of what it waits for.
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # seen: errors of tasks that nobody waits for any more


_parent, _orphaned = os.getppid(), threading.Event()


def note_lost_parent(queue: str, addresses: list[str], path: str) -> None:
    """If the parent ended without stopping this server, note so beside the settings ``path``, for programs that used
    the queue. They do not wait for it to come back."""
    if _orphaned.is_set():
        reason = f"the process that started it (pid {_parent}) was killed or crashed, and its servers ended with it"
        write_trouble(Path(path).parent, Trouble(queue, addresses, reason, "failed"))


def _watch_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def watch() -> None:
        while os.read(0, 4096):
            pass
        if not stop.is_set():
            _orphaned.set()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
