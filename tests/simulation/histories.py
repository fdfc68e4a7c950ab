"""What histories have in common: how they go on, what is checked after each step, how a planted bug is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import pytest

from tests.simulation.peers import LEASING_TASK, Unit
from tests.simulation.world import World
from transfer_queue.control.partition import Partition
from transfer_queue.control.row_states import CONSUMED
from transfer_queue.runtime.controller import Controller

FIRST = int(os.environ.get("TQ_FIRST_SEED", "1"))
PLANTED_SEEDS = 1000


class History(Protocol):
    world: World

    def run(self) -> None: ...


H = TypeVar("H", bound=History)


def replayed(history: H, seed: int, shown: int) -> H:
    """Run a history. An error names its seed and the last ``shown`` events."""
    try:
        history.run()
    except Exception as error:
        error.args = (f"seed {seed}: {error}\n" + "\n".join(history.world.events[-shown:]),)
        raise
    finally:
        history.world.close()
    return history


def advance(world: World, until: float, check: Callable[[], None]) -> None:
    """Go on until then, with a check after each step."""
    world.clock.call_at(until, lambda: None)
    while world.clock.now < until and world.clock.step():
        check()


def check_delivered_once(world: World) -> None:
    doubled = [row for row, times in world.delivered.items() if times > 1]
    assert not doubled, f"rows {doubled} were delivered twice"


def check_blocks(controller: Controller, units: Sequence[Unit]) -> None:
    """Each row has its block on a unit that was not given up."""
    state = controller.core.state
    for slot in state.blocks.live_slots().tolist():
        number = state.blocks.unit.items[slot]
        if number in state.units.lost:
            continue  # given up, though it may come back
        session = next(item for item in controller.units if item.info.unit == number)
        unit = next(unit for unit in units if unit.name == session.info.name)
        assert state.blocks.block.items[slot] in unit.blocks, "a row refers to a block that its unit does not hold"


def consumed_rows(partition: Partition | None) -> set[int]:
    """Rows that the task with leases has consumed."""
    if partition is None or LEASING_TASK not in partition.tasks:
        return set()
    mask = partition.tasks[LEASING_TASK].taken[slice(0, partition.table.used)] == CONSUMED
    return {int(key) for key, ordinal in partition.keys.items() if mask[ordinal - partition.base]}


def check_found(run: Callable[[int], Any], *errors: type[Exception]) -> None:
    """Some seed shows the planted bug by one of these errors."""
    for seed in range(1, PLANTED_SEEDS + 1):
        try:
            run(seed)
        except errors as error:
            print(f"found at seed {seed}: {str(error).splitlines()[0]}")
            return
    pytest.fail(f"not found within {PLANTED_SEEDS} seeds")
