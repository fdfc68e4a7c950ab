"""States that are encoded beside the loop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from transfer_queue.errors import RequestError
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


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
