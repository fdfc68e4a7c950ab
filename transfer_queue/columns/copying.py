"""Copies of long runs of bytes by several threads, as one alone does not fill the bandwidth of the memory."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import pairwise
from typing import Final

import numpy as np

from transfer_queue.columns.column import Bytes

__all__ = ["copy_bytes", "cores"]

_SHARE_BYTES: Final = 8 << 20
"""Least work of a thread. Its start takes as long as to copy a twentieth of this."""
_MOST_THREADS: Final = 4


def copy_bytes(target: Bytes, source: Bytes) -> None:
    """Copy ``source`` to ``target``, of the same size; the GIL is released meanwhile.

    Threads live only as long as the copy, so that nothing idles, and nothing is missing in a forked child.
    """
    threads = min(_MOST_THREADS, source.nbytes // _SHARE_BYTES)
    if threads > 1:
        threads = min(threads, cores())  # a system call, too much for a short copy
    if threads < 2 or target.nbytes != source.nbytes:
        np.copyto(target, source)
        return
    bounds = [source.nbytes * number // threads // 64 * 64 for number in range(threads)] + [source.nbytes]
    parts = [(target[low:high], source[low:high]) for low, high in pairwise(bounds)]
    helpers: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # no thread is to be had, at the end of the process for example
            while len(helpers) < threads - 1:
                helper = threading.Thread(target=np.copyto, args=parts[-1], name="tq-copy-part")
                helper.start()
                helpers.append(helper)
                parts.pop()
        for part in parts:
            np.copyto(*part)
    finally:
        for helper in helpers:
            helper.join()


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
