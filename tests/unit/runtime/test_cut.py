"""States that are encoded beside the loop."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from transfer_queue.errors import RequestError
from transfer_queue.runtime import cut as cuts
from transfer_queue.runtime.cut import cut


@pytest.mark.parametrize("large", [False, True])
def test_a_cut_has_the_state_of_its_moment(large: bool) -> None:
    state = bytearray(3 << 20)
    received = cut(lambda: bytes(state), large)
    state[:] = b"\xff" * len(state)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(received()))
    waiting.start()
    waiting.join(60)
    assert bytes(found[0]) == bytes(3 << 20)  # type: ignore[call-overload]


def test_the_child_holds_no_connection_of_its_parent() -> None:
    ours, theirs = os.pipe()
    go, gate = os.pipe()
    received = cut(lambda: str([_is_open(number) for number in (ours, theirs, go, gate)]).encode(), large=True)
    assert bytes(received()) == b"[False, False, False, False]"
    for number in (ours, theirs, go, gate):
        os.close(number)


def test_a_child_that_ends_early_is_an_error() -> None:
    def die() -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    with pytest.raises(RequestError, match="ended early, with signal 9; give the controller more memory"):
        cut(die, large=True)()


def test_a_state_is_encoded_in_place_where_memory_has_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def who() -> bytes:
        return str(os.getpid()).encode()

    assert bytes(cut(who, large=True)()) != who()
    held = psutil.Process().memory_info().rss
    monkeypatch.setattr(cuts, "available_memory", lambda: held // 2)
    assert bytes(cut(who, large=True)()) == who()


def test_a_child_that_sends_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def stall() -> bytes:
        signal.pause()
        return b""

    monkeypatch.setattr(cuts, "_SILENCE_S", 0.05)
    with pytest.raises(RequestError, match=r"sent nothing for 0\.05 s and was ended"):
        cut(stall, large=True)()
    assert not cuts._children


def test_a_failure_of_the_child_is_told_without_the_locks_of_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="exit status 1"):
        cut(lambda: bytes(1 // 0), large=True)()
    assert "ZeroDivisionError" in capfd.readouterr().err


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
