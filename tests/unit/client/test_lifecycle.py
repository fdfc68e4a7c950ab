"""A process's client at its end, and in a forked child with threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from transfer_queue import lifecycle
from transfer_queue.client.client import AsyncClient
from transfer_queue.config.attach import AttachConfig
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.sampler import SequentialSampler


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


def test_a_second_init_does_not_warn_of_the_same_settings_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"controller": {"addresses": ["127.0.0.1:9"]}}
    state = lifecycle._State()
    state.client = cast(Any, SimpleNamespace(config=AttachConfig.model_validate(address)))
    state.conf = {"controller": {"sampler": SequentialSampler}, "unit_capacity": "64Mi", "missing_fields": None}
    monkeypatch.setattr(lifecycle, "_state", state)
    same = {"controller": {"sampler": "SequentialSampler"}, "unit_capacity": 64 << 20, "missing_fields": "error"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lifecycle._warn_of_differences(same)
    other = {"controller": {"sampler": "GRPOGroupNSampler"}, "unit_capacity": "65Mi", "missing_fields": "drop"}
    with pytest.warns(UserWarning, match=r"sampler.*unit_capacity.*missing_fields: 'drop' \(in effect: 'error'\)"):
        lifecycle._warn_of_differences(other)


def test_threads_that_use_a_client_of_the_parent_at_once_attach_it_once() -> None:
    together, attached = threading.Barrier(2), []

    class Inherited(AsyncClient):
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


FORKS_DURING_AN_IMPORT = """
import os, signal, sys, threading
import transfer_queue.client.io
begun, go_on = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "transfer_queue.columns.encoding":
            begun.set()
            assert go_on.wait(60)

def load():
    import transfer_queue.columns.tensors

sys.meta_path.insert(0, Slow())
loading = threading.Thread(target=load)
loading.start()
assert begun.wait(60)
threading.Timer(0.2, go_on.set).start()
child = os.fork()
if not child:
    signal.alarm(20)
    load()
    os._exit(0)
loading.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_while_a_thread_imports_a_part_of_the_package_can_import_it_too() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FORKS_DURING_AN_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
