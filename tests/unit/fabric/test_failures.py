"""What a NIC is for does not change with the health of others: dead ports and default routes on recorded machines."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.fabric.failures import MACHINES, Case, cases, check, read_machine, state
from transfer_queue.fabric import choose

SAMPLE = 60  #: of up to 24,679 cases a machine; ``python -m tests.unit.fabric.failures`` checks all


@pytest.mark.parametrize("machine", MACHINES)
def test_no_failure_and_no_default_route_gives_a_gpu_anything_but_a_rail(machine: str, tmp_path: Path) -> None:
    fabric = read_machine(machine, tmp_path)
    healthy = choose(fabric)
    everything = list(cases(fabric))
    singles = [case for case in everything if len(case.dead) < 2 and case.route is None]
    for case in {*singles, *random.Random(machine).sample(everything, min(SAMPLE, len(everything)))}:
        check(fabric, healthy, case)


def test_the_route_over_a_gpus_own_rail_leaves_it_the_rail(tmp_path: Path) -> None:
    fabric = read_machine("hgx-8g-12n-ibstat", tmp_path)
    choice = choose(state(fabric, Case((), "mlx5_3")))
    assert choice.gpus[1].hcas == ("mlx5_3",)
