"""When a server that ended is started again."""

from __future__ import annotations

import pytest

from transfer_queue.errors import StartError
from transfer_queue.launch.restarts import MOST_STARTS, Restarts


def test_a_server_that_ends_soon_again_is_started_more_and_more_seldom() -> None:
    restarts, now, delays = Restarts(), 1000.0, []
    for _ in range(9):
        delays.append(restarts.ended(now, "it ended"))
        assert restarts.due == now + delays[-1]
        now = restarts.due
        restarts.started()
        restarts.serves(now)
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.ended(now + 61, "it ended") == 0


def test_a_server_that_cannot_start_is_given_up() -> None:
    restarts = Restarts()
    restarts.ended(0.0, "it ended")
    for _ in range(MOST_STARTS - 1):
        restarts.started()
        restarts.ended(0.0, "no port")
    restarts.started()
    with pytest.raises(StartError, match=rf"no port \({MOST_STARTS} starts in a row failed\)"):
        restarts.ended(0.0, "no port")


def test_what_the_queue_does_not_need_is_started_again_for_ever() -> None:
    restarts, now, delays = Restarts(endless=True), 0.0, []
    for _ in range(12):
        delays.append(restarts.ended(now, "no room"))
        now += delays[-1]
        restarts.started()
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]
