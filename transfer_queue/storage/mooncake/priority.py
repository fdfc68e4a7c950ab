"""Threads that leave the processor to others."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

__all__ = ["LOWER_BY", "with_low_priority"]

T = TypeVar("T")

LOWER_BY: Final = 10
"""Nice levels. Where all cores are busy this still gets a tenth of what another thread gets."""


def with_low_priority(call: Callable[[], T]) -> T:
    """Result of ``call``, made on a new thread that has a lower priority than this one.

    Only a privileged thread could raise its priority again, so that a thread is made for each call. It is no longer
    waited for when the process ends, as a stuck engine would keep it for good.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        with suppress(OSError):  # forbidden in a sandbox: as fast as before
            lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + LOWER_BY)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lowered)
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 (boundary: the caller gets it)
            outcome.set_exception(error)

    threading.Thread(target=work, name="tq-mooncake-wait", daemon=True).start()
    return outcome.result()
