"""Faults of every kind to every part under load: nothing acknowledged is lost, nothing comes twice, no byte is wrong.

`make chaos SEED=1` runs all cells, otherwise a few are drawn; ``TQ_CHAOS_SEED`` repeats a draw.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.chaos import mooncake
from tests.chaos.cells import CELLS, Arena, Cell, wait_for_rows
from tests.chaos.load import Load
from tests.chaos.proxy import Proxy, running_proxy
from tests.integration.stack import Stack
from tests.waiting import wait_until

TIMING = {"heartbeat": 0.3, "peerTimeout": 5.0, "reconnectGrace": 60.0}
"""Nobody is given up while this machine takes its time to start a process anew."""
SEED = int(os.environ.get("TQ_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
ALL = os.environ.get("TQ_CHAOS_ALL") == "1"
DRAWN = 4
BOUND_S = 60.0
"""From the end of a fault until rows are put and delivered again."""


class ProxiedStack(Stack):
    """Its storage units reach the controller through a proxy, and so do clients that ask for ``link``."""

    def __init__(self, seed: int, exits: ExitStack) -> None:
        super().__init__(units=2, capacity="16Mi", durability="process", timing=TIMING)
        self._exits = exits
        self._seed = seed
        self.unit_link: Proxy | None = None

    def address_for_units(self) -> str:
        if self.unit_link is None:
            self.unit_link = self._exits.enter_context(running_proxy(self.address, self._seed))
        return self.unit_link.address


@contextmanager
def proxied_stack(seed: int) -> Iterator[tuple[ProxiedStack, Proxy]]:
    with ExitStack() as exits:
        stack = ProxiedStack(seed, exits)
        exits.callback(stack.stop)
        stack.start()
        yield stack, exits.enter_context(running_proxy(stack.address, seed))


def run(cell: Cell, number: int, stack: ProxiedStack, link: Proxy) -> tuple[int, float]:
    """Rows acknowledged, and seconds until rows went through again after the fault."""
    assert stack.unit_link is not None
    load = Load(
        link.address, partition=f"cell-{number}", lease_s=cell.lease_s, pause_s=cell.pause_s, together=cell.together
    )
    with load:
        wait_for_rows(load, 60, f"{cell.name}: load runs before")
        cell.inflict(Arena(stack, link, stack.unit_link, load))
        over, put, got = time.monotonic(), len(load.acknowledged), len(load.delivered)
        wait_until(
            lambda: (len(load.acknowledged) > put and len(load.delivered) > got) or bool(load.errors),
            f"{cell.name}: rows go through again",
            BOUND_S,
        )
        recovery = time.monotonic() - over
        load.drain()
    assert load.errors == [], cell.name
    assert load.wrong == [], cell.name
    assert set(load.acknowledged) - set(load.delivered) == set(), cell.name
    if not cell.lease_s:
        assert [row for row, times in Counter(load.delivered).items() if times > 1] == [], cell.name
    return len(load.acknowledged), recovery


@pytest.mark.timeout(3600)
def test_the_fault_matrix_keeps_what_was_promised() -> None:
    chance = random.Random(SEED)
    every = [*CELLS, *mooncake.CELLS]
    cells = chance.sample(every, len(every) if ALL else DRAWN)
    print(f"\nTQ_CHAOS_SEED={SEED}: {', '.join(cell.name for cell in cells)}")
    total = 0
    with proxied_stack(SEED) as (stack, link):
        for number, cell in enumerate(cells):
            try:
                if isinstance(cell, Cell):
                    rows, recovery = run(cell, number, stack, link)
                else:
                    rows, recovery = cell.run(BOUND_S)
            except BaseException as error:
                error.args = (f"TQ_CHAOS_SEED={SEED}, {cell.name}: {error}",)
                raise
            total += rows
            print(f"{cell.part:24} {cell.fault:32} {rows:7} rows  lost 0  twice 0  wrong 0  resumed {recovery:6.2f} s")
    print(f"{len(cells)} cells, {total} rows acknowledged, lost 0, wrong 0")
