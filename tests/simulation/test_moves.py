"""Whole histories of a partition that moves between two controllers, while both, the movers and clients are killed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

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
from tests.simulation.movers import FollowingClient, Mover, Shard
from tests.simulation.peers import PARTITION, Unit
from tests.simulation.world import World
from transfer_queue.control import moves
from transfer_queue.control.commands import Command
from transfer_queue.control.core import ControlCore
from transfer_queue.runtime.moves import PartitionMoves

SEEDS = int(os.environ.get("TQ_SEEDS", "30"))
SHARDS = 2
ACTIONS = 70
SETTLING_S = (15.0, 120.0)
"""At least, and at most: until all rows are consumed."""


class History:
    """One seed: actions of clients and movers and faults, then calm until everything is settled."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, SHARDS)
        self.units = [
            [Unit(Shard(self.world, shard), f"unit-{number}") for number in range(2)]  # type: ignore[arg-type]
            for shard in range(SHARDS)
        ]
        self.clients = [FollowingClient(self.world, f"client-{number}", self.units) for number in range(3)]
        self.movers: list[Mover] = []
        self.rows = self.steps = self.moved = 0

    def run(self) -> None:
        """AssertionError if an invariant does not hold."""
        world, chance = self.world, self.world.random
        at = 0.0
        for _ in range(ACTIONS):
            at += chance.expovariate(5.0)
            world.clock.call_at(at, self._act)
        self._advance(at + 0.1)
        for mover in self.movers:
            mover.die()
        enough, deadline = (world.clock.now + seconds for seconds in SETTLING_S)
        while world.clock.now < enough or (world.clock.now < deadline and not self._is_done()):
            if not self.movers or self.movers[-1].dead:
                self.movers.append(Mover(world, f"settler-{len(self.movers)}", self.units, only_settle=True))
            self._advance(world.clock.now + 0.25)
            client = next(client for client in self.clients if not client.dead)
            if client.idle:
                client.here.fetch(3 if chance.random() < 0.5 else 1, 0.0)
                client.here.fetch_leased(3 if chance.random() < 0.5 else 1, 0.0)
        self._check_settled()

    def _is_done(self) -> bool:
        rows = {row for client in self.clients for row in client.acknowledged}
        delivered = rows <= self.world.delivered.keys() or self.world.abandoned > 0
        return delivered and rows <= self.world.finished and all(client.idle for client in self.clients)

    def _advance(self, until: float) -> None:
        advance(self.world, until, self._check_step)

    def _act(self) -> None:
        world, chance = self.world, self.world.random
        client = chance.choice([client for client in self.clients if not client.dead])
        what = chance.random()
        if what < 0.38:
            rows = list(range(self.rows, self.rows + chance.randint(1, 3)))
            self.rows += len(rows)
            client.here.put(rows)
        elif what < 0.54:
            client.here.fetch(chance.randint(1, 3))
        elif what < 0.64:
            client.here.fetch_leased(chance.randint(1, 3))
        elif what < 0.78:
            steps = chance.choice((1000, chance.randint(1, 6)))
            self.movers.append(Mover(world, f"mover-{len(self.movers)}", self.units, steps=steps))
        elif what < 0.81 and self.movers:
            self.movers[-1].die()
        elif what < 0.90:
            world.cut_one()
        elif what < 0.98:
            world.restart(chance.randrange(SHARDS))
        elif sum(not client.dead for client in self.clients) > 1:
            client.die()

    def _check_step(self) -> None:
        self.steps += 1
        check_delivered_once(self.world)
        for shard, server in enumerate(self.world.servers):
            assert server.failure is None
            check_blocks(server.controller, self.units[shard])
            if self.steps % 50 == 0:
                server.controller.core.validate_state()

    def _check_settled(self) -> None:
        cores = [server.controller.core for server in self.world.servers]
        owners = [shard for shard, server in enumerate(self.world.servers) if _serves(server.controller.moves)]
        assert len(owners) == 1, f"the partition is on the controllers {owners}"
        for core in cores:
            core.validate_state()
            assert not core.state.moves.arriving, "a move is neither completed nor undone"
        assert all(core.state.partitions.get(PARTITION) is None for n, core in enumerate(cores) if n not in owners)
        self.moved = sum(mover.left for mover in self.movers)
        acknowledged = {row for client in self.clients for row in client.acknowledged}
        partition = cores[owners[0]].state.partitions.get(PARTITION)
        known = set() if partition is None else {int(key) for key in partition.keys}
        assert not acknowledged - known, f"rows {sorted(acknowledged - known)} were acknowledged and are gone"
        missing = acknowledged - self.world.delivered.keys()
        if not self.world.abandoned:
            assert not missing, f"rows {sorted(missing)} were acknowledged and never delivered"
        consumed = consumed_rows(partition)
        assert not self.world.finished - consumed, "rows were acknowledged by their task and are not consumed"
        assert consumed <= self.world.worked, "rows count as done and are not"
        assert not acknowledged - consumed, "rows were promised at least once and nobody was done with them"
        for shard, core in enumerate(cores):
            held = {block for unit in self.units[shard] for block in unit.blocks}
            live = set(core.state.blocks.block.array[core.state.blocks.live_slots()].tolist())
            assert held == live, f"{len(held - live)} blocks of controller {shard} are held for nobody"


def _serves(found: PartitionMoves) -> bool:
    return found.elsewhere(Command(PARTITION)) is None


def run(seed: int) -> History:
    return replayed(History(seed), seed, 60)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "transfer_queue")  # until the end of the test


@pytest.mark.timeout(3600)
def test_no_history_of_moves_breaks_a_promise() -> None:
    print(f"seeds {FIRST} to {FIRST + SEEDS - 1}")
    moved = sum(run(seed).moved for seed in range(FIRST, FIRST + SEEDS))
    print(f"{moved} moves")
    assert moved > SEEDS / 2  # or nothing was simulated


def test_a_block_that_is_freed_while_its_unit_registers_is_dropped() -> None:
    run(6099)


def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionMoves, "holds", lambda self, body: False)


def _target_serves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moves.receive

    def hasty(core: ControlCore, name: str, *arguments: object) -> None:
        real(core, name, *arguments)  # type: ignore[arg-type]
        core.state.moves.here[name] = None
        core.state.moves.away.pop(name, None)

    monkeypatch.setattr(moves, "receive", hasty)


@pytest.mark.parametrize("plant", [_no_fence, _target_serves_at_once])
def test_a_planted_bug_of_moves_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    check_found(run, AssertionError, KeyError)
