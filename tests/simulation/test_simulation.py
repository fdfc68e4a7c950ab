"""Whole histories of a queue on a virtual clock: crashes, broken connections, restarts, in any order.

A failing seed is one number: ``TQ_SEEDS=1 TQ_FIRST_SEED=<seed>`` replays it exactly. `make simulate SEEDS=10000`.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.histories import (
    FIRST,
    advance,
    check_blocks,
    check_delivered_once,
    check_found,
    consumed_rows,
    replayed,
)
from tests.simulation.peers import Client, Unit
from tests.simulation.world import World
from transfer_queue.control.commands import Acknowledge
from transfer_queue.control.core import ControlCore
from transfer_queue.control.locks import Locks
from transfer_queue.runtime import recovery
from transfer_queue.runtime.durable import GroupCommit
from transfer_queue.runtime.sessions import ClientSession

SEEDS = int(os.environ.get("TQ_SEEDS", "200"))
FOUND = (540,)
"""Seeds that once failed: rows that were committed between a unit's inventory and its arrival stayed lost."""
ACTIONS = 60
SETTLING_S = 45.0


class History:
    """One seed: some actions of clients, some faults, then calm until everything is settled."""

    def __init__(self, seed: int, *, repeats_under_new_ids: bool = False) -> None:
        self.world = World(seed)
        self.units = [Unit(self.world, f"unit-{number}") for number in range(2)]
        self.clients = [
            Client(
                self.world,
                f"client-{number}",
                self.units,
                repeats_under_new_ids,
                random.Random(seed) if seed % 3 == 1 else None,
            )
            for number in range(3)
        ]
        self.rows = 0
        self.steps = 0
        self.lock_chance = random.Random(seed)  # of its own: it changes nothing for seeds without locks
        self.locks = seed % 2 == 1

    def run(self) -> None:
        """AssertionError if an invariant does not hold."""
        world, chance = self.world, self.world.random
        at = 0.0
        for _ in range(ACTIONS):
            at += chance.expovariate(10.0)
            world.clock.call_at(at, self._act)
        calm = at + 0.1
        self._advance(calm)
        deadline = calm + SETTLING_S
        while world.clock.now < deadline:
            self._advance(world.clock.now + 0.25)
            self.locks = False
            client = next(client for client in self.clients if not client.dead)
            if client.idle:
                client.fetch(3 if chance.random() < 0.5 else 1, 0.0)
                client.fetch_leased(3 if chance.random() < 0.5 else 1, 0.0)
        self._check_settled()

    def _advance(self, until: float) -> None:
        advance(self.world, until, self._check_step)

    def _act(self) -> None:
        world, chance = self.world, self.world.random
        client = chance.choice([client for client in self.clients if not client.dead])
        if self.locks:
            odds = self.lock_chance
            keys, hold_s = odds.choice((["a"], ["b"], ["b", "a"])), odds.choice((0.0, 0.2, 2.0))
            client.lock(keys, odds.choice((0.0, 1.0, math.inf)), odds.choice((0.5, 5.0)), hold_s)
        what = chance.random()
        if what < 0.45:
            rows = list(range(self.rows, self.rows + chance.randint(1, 3)))
            self.rows += len(rows)
            client.put(rows)
        elif what < 0.62:
            client.fetch(chance.randint(1, 3))
        elif what < 0.75:
            client.fetch_leased(chance.randint(1, 3))
        elif what < 0.82 and world.delivered:
            row = chance.choice(sorted(world.delivered))
            world.cleared.add(row)
            client.clear([str(row)])
        elif what < 0.90:
            world.cut_one()
        elif what < 0.97:
            world.restart()
        elif sum(not client.dead for client in self.clients) > 1:
            client.die()

    def _check_step(self) -> None:
        self.steps += 1
        check_delivered_once(self.world)
        assert self.world.server.failure is None
        check_blocks(self.world.server.controller, self.units)
        if self.steps % 50 == 0:
            self.world.server.controller.core.validate_state()
            self._check_consumed()

    def _check_consumed(self) -> set[int]:
        """What was acknowledged stays consumed, whatever restarted since; nothing else is. Returns those rows."""
        consumed = consumed_rows(self.world.server.controller.core.state.partitions.get("p"))
        forgotten = self.world.finished - self.world.cleared - consumed
        assert not forgotten, f"rows {sorted(forgotten)} were acknowledged and are not consumed"
        assert consumed <= self.world.worked, f"rows {sorted(consumed - self.world.worked)} count as done and are not"
        return consumed

    def _check_settled(self) -> None:
        core = self.world.server.controller.core
        core.validate_state()
        assert (core.state.locks.held, core.state.locks.waiting) == (0, 0), (
            "a lock outlives its holder, or a request waits for ever"
        )
        acknowledged = {row for client in self.clients for row in client.acknowledged}
        partition = core.state.partitions.get("p")
        known = set() if partition is None else {int(key) for key in partition.keys}
        gone = acknowledged - known - self.world.cleared
        assert not gone, f"rows {sorted(gone)} were acknowledged and are gone"
        missing = acknowledged - self.world.delivered.keys()
        if not self.world.abandoned:
            assert not missing, f"rows {sorted(missing)} were acknowledged and never delivered"
        unfinished = acknowledged - self._check_consumed() - self.world.cleared
        assert not unfinished, f"rows {sorted(unfinished)} were promised at least once and nobody was done with them"
        surprising = self.world.delivered.keys() - {
            row for client in self.clients for row in client.acknowledged | client.uncertain
        }
        assert not surprising, f"rows {sorted(surprising)} were delivered and never put"
        held = {block for unit in self.units for block in unit.blocks}
        live = set(core.state.blocks.block.array[core.state.blocks.live_slots()].tolist())
        assert held == live, f"{len(held - live)} blocks are held for nobody"


def run(seed: int, **bugs: bool) -> History:
    return replayed(History(seed, **bugs), seed, 40)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "transfer_queue")  # until the end of the test


@pytest.mark.timeout(3600)
def test_no_history_breaks_a_promise() -> None:
    print(f"seeds {FIRST} to {FIRST + SEEDS - 1}")
    delivered = sum(len(run(seed).world.delivered) for seed in {*FOUND, *range(FIRST, FIRST + SEEDS)})
    assert delivered > SEEDS  # or nothing was simulated


def test_no_history_breaks_a_promise_with_snapshots_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "is_large", lambda core: True)
    assert sum(len(run(seed).world.delivered) for seed in range(1, 11)) > 10


def test_a_seed_replays_exactly() -> None:
    first, second = run(7), run(7)
    assert first.world.events == second.world.events
    assert first.steps == second.steps


def _answers_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(GroupCommit, "after", lambda self, action, *arguments: action(*arguments))
    return {}


def _repeats_under_new_ids(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    return {"repeats_under_new_ids": True}


def _leases_of_the_dead_stay(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(ControlCore, "client_gone", lambda self, client, now: self.cancel(client, None, now))
    return {}


def _acknowledgements_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    real = ControlCore._handlers[Acknowledge]

    def silent(self: ControlCore, *arguments: Any) -> Any:
        with self.state.log.silenced():
            return real(self, *arguments)

    monkeypatch.setitem(ControlCore._handlers, Acknowledge, silent)
    return {}


def _locks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    real = Locks._grant

    def silent(self: Locks, *arguments: Any) -> Any:
        with self._log.silenced():
            return real(self, *arguments)

    monkeypatch.setattr(Locks, "_grant", silent)
    return {}


def _lines_outlive_their_session(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(ClientSession, "end_secondary", lambda self: None)
    return {}


def _snapshots_come_late(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(recovery, "cut", lambda encode, large: encode)
    return {}


@pytest.mark.parametrize(
    "plant",
    [
        _answers_do_not_wait,
        _repeats_under_new_ids,
        _leases_of_the_dead_stay,
        _acknowledgements_are_not_kept,
        _locks_are_not_kept,
        _lines_outlive_their_session,
        _snapshots_come_late,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = plant(monkeypatch)
    check_found(lambda seed: run(seed, **bugs), AssertionError)
