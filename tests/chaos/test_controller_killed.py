"""The controller is killed under load, again and again: nothing acknowledged is lost, nothing comes twice."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests.chaos.load import Load, percentile
from tests.integration.stack import running_stack
from tests.waiting import wait_until

TIMING = {"heartbeat": 0.3, "peerTimeout": 10.0, "reconnectGrace": 20.0}
"""A unit is not given up while this machine takes its time to start it anew."""
KILLS = int(os.environ.get("TQ_CHAOS_KILLS", "2"))
"""`make chaos` does 50."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durability", ["process", "node"])
def test_a_controller_killed_under_load_loses_and_doubles_nothing(durability: str) -> None:
    resumed = []
    with (
        running_stack(units=2, capacity="64Mi", durability=durability, timing=TIMING) as stack,
        Load(stack.address) as load,
    ):
        for number in range(KILLS):
            wanted = len(load.delivered) + 200
            wait_until(lambda wanted=wanted: len(load.delivered) >= wanted, f"load runs before kill {number}", 120)
            stack.controller.kill()
            killed = time.monotonic()
            stack.restart_controller()
            wait_until(lambda killed=killed: load.progress[-1] > killed + 0.01, f"clients resume after {number}", 120)
            resumed.append(next(at for at in load.progress if at > killed + 0.01) - killed)
        load.drain()
    print(
        f"{durability}: {KILLS} kills, {len(load.acknowledged)} rows acknowledged, {len(load.delivered)} delivered; "
        f"resumed after p50 {percentile(resumed, 0.5):.2f} s, p99 {percentile(resumed, 0.99):.2f} s"
    )
    assert load.errors == []
    assert load.wrong == []
    assert set(load.acknowledged) - set(load.delivered) == set()
    assert [number for number, times in Counter(load.delivered).items() if times > 1] == []
