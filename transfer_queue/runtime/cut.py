"""Encodes a large state as it is at one moment while the event loop goes on changing it.

A child process is forked for this: it has all memory as of that moment, without a copy, and nothing else to do.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import struct
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from transfer_queue.control.core import ControlCore
from transfer_queue.errors import RequestError
from transfer_queue.runtime.connection import Buffer

__all__ = ["cut", "is_large"]

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_DESCRIPTORS = 1 << 20
_FEW = 4000
"""So many rows, blocks and partitions are encoded in less time than a process takes to start."""
_LARGE = 1 << 20
"""Bytes of a write or read."""


def cut(encode: Callable[[], bytes], large: bool) -> Callable[[], Buffer]:
    """Fix the state of now; the function that is returned waits for its encoding, in any thread, once.

    ``encode`` only reads memory: it uses no locks, files or threads. ``large``: encode in a child process, as it takes
    longer than forking one. The function that is returned raises RequestError if the child fails.
    """
    if large:
        try:
            return _fork(encode)
        except OSError as error:
            log.warning("no process for a snapshot (%s): it is made here, and requests wait meanwhile", error.strerror)
    content = encode()
    return lambda: content


def is_large(core: ControlCore) -> bool:
    """Whether to encode this state takes longer than forking a process."""
    return core.state.rows + core.state.blocks.count + len(core.state.partitions) > _FEW


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
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


def _receive(child: int, reader: int) -> Buffer:
    try:
        head = os.read(reader, _LENGTH.size)
        size = _LENGTH.unpack(head)[0] if head else 0
        content = memoryview(mmap.mmap(-1, max(1, size)))[:size]
        received = 0
        while received < size and (count := os.readv(reader, [content[received : received + _LARGE]])):
            received += count
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    if status or received < size:
        code = os.waitstatus_to_exitcode(status)
        raise RequestError(
            "the process that encoded the state of the controller ended early, with "
            f"{f'signal {-code}' if code < 0 else f'exit status {code}'}; give the controller more memory, or keep "
            "fewer rows"
        )
    return content
