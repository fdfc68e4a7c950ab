"""Clients that lose a controller together come back apart."""

from __future__ import annotations

import itertools
import random

import pytest

from transfer_queue.client.session import retry_delay

CLIENTS = 8192


def test_the_first_attach_waits_for_nothing() -> None:
    assert retry_delay(0, 0.99) == 0


@pytest.mark.parametrize("attempt", [1, 2, 5, 20])
def test_clients_spread_evenly_over_the_window(attempt: int) -> None:
    chance = random.Random(7)
    delays = [retry_delay(attempt, chance.random()) for _ in range(CLIENTS)]
    window = retry_delay(attempt, 1.0)
    tenths = [0] * 10
    for delay in delays:
        tenths[int(delay / window * 10)] += 1
    assert min(tenths) > CLIENTS * 0.08
    assert max(tenths) < CLIENTS * 0.12


def test_the_window_doubles_to_a_bound() -> None:
    windows = [retry_delay(attempt, 1.0) for attempt in range(1, 40)]
    assert all(1 <= later / earlier <= 2 for earlier, later in itertools.pairwise(windows))
    assert windows[1] == 2 * windows[0]
    assert windows[-1] == windows[-2] >= 1
