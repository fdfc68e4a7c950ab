"""Faults of the machine under a queue that ``tq up`` keeps, with TLS and durability ``process``, under load.

`make chaos` causes all of them, otherwise one is drawn with the seed of the matrix.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.chaos.cells import faketime, wait_for_rows
from tests.chaos.load import Load
from tests.chaos.test_matrix import ALL, SEED
from tests.waiting import wait_until
from transfer_queue.errors import StartError
from transfer_queue.launch.local import LocalStack, default_plan

FOREIGN = b"the notes of somebody else"


class Keeper(threading.Thread):
    """Restarts what ends, as ``tq up`` does."""

    def __init__(self, stack: LocalStack) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self._ended = threading.Event()
        self.pause = threading.Lock()
        """Nothing is restarted while it is held."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        while not self._ended.wait(0.2):
            with self.pause:
                try:
                    self._stack.restart_ended()
                except StartError as error:
                    self.failure = error
                    return

    def end(self) -> None:
        self._ended.set()
        self.join(60)


@dataclass
class Kept:
    """``clock``: a file with the offset of the servers' wall clock."""

    stack: LocalStack
    load: Load
    arenas: Path
    clock: Path
    keeper: Keeper

    def kill(self, number: int) -> None:
        """0 is the controller, 1 and 2 are the storage units."""
        server = self.stack.processes[number]
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.failure() is not None, f"{server.name} is dead")

    def ended(self, number: int) -> None:
        server = self.stack.processes[number]
        wait_until(lambda: server.failure() is not None, f"{server.name} ended", 120)

    def serves(self) -> None:
        wait_until(
            lambda: all(server.failure() is None and server.address for server in self.stack.processes),
            "all serve",
            120,
        )

    def rows_go_through(self, what: str) -> None:
        wait_for_rows(self.load, 60, what)


def _units_killed(kept: Kept) -> None:
    for number in (1, 2, 1):
        kept.kill(number)
        kept.serves()
        kept.rows_go_through(f"rows go through after kill of {number}")


def _arena_squatted(kept: Kept) -> None:
    """While a unit is dead, a file of something else takes the place of its arena. It is refused and stays."""
    (arena,) = kept.arenas.glob("storage-0.arena")
    aside = arena.with_suffix(".aside")
    with kept.keeper.pause:
        kept.kill(1)
        arena.rename(aside)
        arena.write_bytes(FOREIGN)
    log = kept.stack.processes[1].log
    wait_until(lambda: f"{arena} is not an arena" in log.read_text(), "the unit refuses the file", 120)
    with kept.keeper.pause:
        assert arena.read_bytes() == FOREIGN
        aside.replace(arena)
    kept.serves()


def _state_folder_full(kept: Kept) -> None:
    """The controller cannot write its journal, and then a unit its index."""
    for number in (0, 1):
        pid = kept.stack.processes[number].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        if number == 0:
            wait_until(lambda pid=pid: kept.stack.processes[0].pid != pid, "the controller is started again", 120)
        else:
            kept.rows_go_through("rows go to the other unit")
            kept.kill(1)
        kept.serves()
        kept.rows_go_through("rows go through again")


def _clock_jumps(kept: Kept) -> None:
    """The servers' wall clock is a day ahead, in which time they are killed too, and then a day behind."""
    for jump in ("+1d", "-1d", "+0"):
        kept.clock.write_text(jump)
        kept.rows_go_through(f"rows go through with the clock at {jump}")
        if jump == "+1d":
            for number in (0, 1):
                kept.kill(number)
                kept.serves()
                kept.rows_go_through(f"server {number} was started with the clock at {jump}")


CELLS: dict[str, Callable[[Kept], None]] = {
    "units killed": _units_killed,
    "arena squatted": _arena_squatted,
    "state folder full": _state_folder_full,
    **({"clock jumps": _clock_jumps} if faketime() else {}),
}


@contextmanager
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    arenas, clock = tmp_path / "arenas", tmp_path / "clock"
    arenas.mkdir(mode=0o700)
    clock.write_text("+0")
    if library := faketime():
        monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
        monkeypatch.setenv("LD_PRELOAD", str(library))
    plan = default_plan(units=2, unit_capacity=64 << 20)
    units = tuple(unit.model_copy(update={"durability": "process"}) for unit in plan.units)
    controller = plan.controller.model_copy(update={"durability": "process"})
    plan = replace(plan, controller=controller, units=units, tls=True).with_folders(tmp_path / "journal", arenas)
    with LocalStack(plan, tmp_path / "logs").start() as stack:
        keeper = Keeper(stack)
        keeper.start()
        try:
            with Load(stack.attach_config) as load:
                yield Kept(stack, load, arenas, clock, keeper)
        finally:
            keeper.end()
            assert keeper.failure is None


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CELLS if ALL else ["drawn"])  # the processes of a run must collect the same tests
def test_a_queue_of_tq_up_keeps_what_was_promised(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "drawn":
        name = random.Random(SEED).choice(list(CELLS))
    print(f"TQ_CHAOS_SEED={SEED}: {name}")
    with _kept(tmp_path, monkeypatch) as kept:
        kept.rows_go_through("load runs before")
        CELLS[name](kept)
        kept.rows_go_through("rows go through again")
        load = kept.load
        load.drain()
        print(f"tq up: {name}: {len(load.acknowledged)} rows acknowledged")
        assert load.errors == []
        assert load.wrong == []
        assert set(load.acknowledged) - set(load.delivered) == set()
        assert [row for row, times in Counter(load.delivered).items() if times > 1] == []
