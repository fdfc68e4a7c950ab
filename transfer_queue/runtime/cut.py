"""Encodes a large state as it is at one moment while the event loop goes on changing it.

A child process is forked for this: it has all memory as of that moment, without a copy, and nothing else to do. What
parent or child touch meanwhile is copied, at most as much as the parent holds. A container that runs out of memory may
be ended as a whole (``memory.oom.group``), so the state is encoded without a child where that much is not free.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import select
import signal
import struct
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import psutil

from transfer_queue.control.core import ControlCore
from transfer_queue.errors import RequestError
from transfer_queue.runtime.memory import available_memory
from transfer_queue.wire.frames import Buffer

__all__ = ["cut", "is_large"]

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_DESCRIPTORS = 1 << 20
_FEW = 4000
"""So many rows, blocks and partitions are encoded in less time than a process takes to start."""
_LARGE = 1 << 20
"""Bytes of a write or read."""
_SILENCE_S = 120.0
"""A child that sends nothing for this time is ended."""
_children: set[int] = set()


def cut(encode: Callable[[], bytes], large: bool) -> Callable[[], Buffer]:
    """Fix the state of now; the function that is returned waits for its encoding, in any thread, once.

    ``encode`` only reads memory: it uses no locks, files or threads. ``large``: encode in a child process, as it takes
    longer than forking one, if there is memory for that. The function that is returned raises RequestError if the child
    fails.
    """
    if large and _has_memory():
        try:
            return _fork(encode)
        except OSError as error:
            log.warning("no process for a snapshot (%s): it is made here, and requests wait meanwhile", error.strerror)
    content = encode()
    return lambda: content


def is_large(core: ControlCore) -> bool:
    """Whether to encode this state takes longer than forking a process."""
    return core.state.rows + core.state.blocks.count + len(core.state.partitions) > _FEW


def _has_memory() -> bool:
    """Whether the copies of a further child, and of those that run, fit."""
    held = psutil.Process().memory_info().rss
    available = available_memory()
    if available >= held * (1 + len(_children)):
        return True
    log.warning(
        "%d MiB of memory are free and %d MiB in use, too little for a process that makes a snapshot: it is made here, "
        "and requests wait meanwhile; give the controller a memory limit of more than twice what it holds",
        available >> 20,
        held >> 20,
    )
    return False


def _fork(encode: Callable[[], bytes]) -> Callable[[], Buffer]:
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child uses nothing that they lock
            child = os.fork()
    except BaseException:
        os.close(reader)
        os.close(writer)
        raise
    if not child:
        _encode(encode, writer)
    os.close(writer)
    _children.add(child)
    return lambda: _receive(child, reader)


def _encode(encode: Callable[[], bytes], writer: int) -> NoReturn:
    """The life of the child."""
    try:
        gc.disable()
        os.closerange(0, 2)  # pipes, sockets and locks are to end with the parent; errors still go to standard error
        os.closerange(3, writer)
        os.closerange(writer + 1, _DESCRIPTORS)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory is short, this copy goes first
        content = encode()
        for part in (_LENGTH.pack(len(content)), content):
            left = memoryview(part)
            while left:
                left = left[os.write(writer, left[:_LARGE]) :]
        os._exit(0)
    except BrokenPipeError:  # the parent ended
        pass
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))  # sys.stderr has a lock
        raise
    finally:
        os._exit(1)


def _receive(child: int, reader: int) -> Buffer:
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    silent = False

    def read(buffer: memoryview) -> int:
        nonlocal silent
        silent = not waiting.poll(_SILENCE_S * 1000)
        return 0 if silent else os.readv(reader, [buffer])

    size = received = 0
    content = memoryview(b"")
    try:
        head = bytearray(_LENGTH.size)
        if read(memoryview(head)):
            size = _LENGTH.unpack(head)[0]
            content = memoryview(mmap.mmap(-1, max(1, size)))[:size]
            while received < size and (count := read(content[received : received + _LARGE])):
                received += count
    finally:
        os.close(reader)
        if received < size or silent:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        _children.discard(child)
    if silent:
        raise RequestError(
            f"the process that encoded the state of the controller sent nothing for {_SILENCE_S:g} s and was ended; "
            "try again, and give the controller more CPU if it repeats"
        )
    if status or received < size:
        code = os.waitstatus_to_exitcode(status)
        raise RequestError(
            "the process that encoded the state of the controller ended early, with "
            f"{f'signal {-code}' if code < 0 else f'exit status {code}'}; give the controller more memory, or keep "
            "fewer rows"
        )
    return content
