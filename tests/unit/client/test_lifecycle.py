"""A process's client at its end, and in a forked child with threads."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, cast

import pytest

from transfer_queue.client import lifecycle
from transfer_queue.client.client import AsyncTransferQueueClient
from transfer_queue.errors import WaitTimeoutError


def test_servers_are_stopped_though_the_client_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    class Client:
        def close(self) -> None:
            raise WaitTimeoutError("no result within 5 s")

    class Local:
        def stop(self) -> None:
            stopped.append(self)

    state = lifecycle._State()
    state.client, state.local, state.local_pid = cast(Any, Client()), cast(Any, Local()), os.getpid()
    monkeypatch.setattr(lifecycle, "_state", state)
    with pytest.raises(WaitTimeoutError):
        lifecycle.close()
    assert stopped


def test_threads_that_use_a_client_of_the_parent_at_once_attach_it_once() -> None:
    together, attached = threading.Barrier(2), []

    class Inherited(AsyncTransferQueueClient):
        def __init__(self) -> None:
            self._closed, self._pid = False, 0

        def _attach(self) -> None:
            attached.append(self)
            with suppress(threading.BrokenBarrierError):
                together.wait(0.5)
            self._pid = os.getpid()

    client = Inherited()
    threads = [threading.Thread(target=client._ready) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attached) == 1
