"""Copies by several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from transfer_queue.columns import copying

MIB = 1 << 20


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Threads that were started, on a machine of eight cores."""
    found: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        found.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    monkeypatch.setattr(copying, "cores", lambda: 8)
    return found


@pytest.mark.parametrize(
    ("nbytes", "helpers"), [(0, 0), (5, 0), (16 * MIB - 1, 0), (16 * MIB, 1), (24 * MIB + 7, 2), (70 * MIB + 63, 3)]
)
def test_every_byte_is_copied_once_and_no_thread_stays(
    nbytes: int, helpers: int, started: list[threading.Thread]
) -> None:
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    memory = np.full(nbytes + 2, 7, np.uint8)
    copying.copy_bytes(memory[1:-1], source)
    assert np.array_equal(memory[1:-1], source)
    assert memory[0] == memory[-1] == 7
    assert len(started) == helpers
    assert not any(thread.is_alive() for thread in started)


def test_without_further_threads_all_is_copied_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "cores", lambda: 8)
    monkeypatch.setattr(threading.Thread, "start", refused)
    source = np.arange(32 * MIB, dtype=np.uint8)
    target = np.zeros_like(source)
    copying.copy_bytes(target, source)
    assert np.array_equal(target, source)


def test_what_cannot_be_copied_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "cores", lambda: 8)
    source = np.zeros(32 * MIB, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        copying.copy_bytes(np.zeros(32 * MIB - 1, np.uint8), source)
