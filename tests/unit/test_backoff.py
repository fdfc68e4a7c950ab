"""Delays between attempts: clients that lose a controller together come back apart."""

from __future__ import annotations

import itertools
import random

import pytest

from transfer_queue.backoff import Backoff

CLIENTS = 8192


@pytest.mark.parametrize("attempt", [1, 2, 5, 20])
def test_clients_spread_evenly_over_the_window(attempt: int) -> None:
    chance = random.Random(7)
    window = list(itertools.islice(delays(Backoff(0.1, 1.0)), attempt))[-1]
    tenths = [0] * 10
    for _ in range(CLIENTS):
        backoff = Backoff(0.1, 1.0, spread=1.0, chance=chance.random)
        delay = list(itertools.islice(delays(backoff), attempt))[-1]
        tenths[int(delay / window * 10)] += 1
    assert min(tenths) > CLIENTS * 0.08
    assert max(tenths) < CLIENTS * 0.12


def test_delays_double_to_a_bound_and_start_again_after_a_success() -> None:
    backoff = Backoff(0.1, 0.5)
    assert list(itertools.islice(delays(backoff), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_a_part_of_a_delay_is_random() -> None:
    assert [Backoff(1.0, 1.0, spread=0.5, chance=lambda c=c: c).next_s() for c in (0.0, 1.0)] == [0.5, 1.0]


def delays(backoff: Backoff):  # type: ignore[no-untyped-def]
    while True:
        yield backoff.next_s()
