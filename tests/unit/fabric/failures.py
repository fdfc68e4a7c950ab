"""Every recorded machine with up to two dead ports and the default route on any NIC, and what holds in each case.

``python -m tests.unit.fabric.failures`` checks the whole product and prints the counts; the tests take a sample.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from tests.unit.fabric.trees import DATA, build, facts_of
from transfer_queue.fabric import Choice, Fabric, Hca, choose, read_fabric

MACHINES = sorted(path.stem for path in DATA.glob("*.json"))


@dataclass(frozen=True)
class Case:
    """One state of a machine."""

    dead: tuple[str, ...]
    route: str | None  #: the NIC that carries the default route


def read_machine(machine: str, root: Path) -> Fabric:
    build(facts_of(machine), root)
    return read_fabric(root)


def cases(fabric: Fabric) -> Iterator[Case]:
    names = [hca.name for hca in fabric.hcas]
    for count in range(3):
        for dead in combinations(names, count):
            for route in (None, *names):
                yield Case(dead, route)


def state(fabric: Fabric, case: Case) -> Fabric:
    """The machine in that state, its files listed in another order. A dead port reports a rate that is not its own."""

    def turn(hca: Hca) -> Hca:
        ports = hca.ports
        if hca.name in case.dead:
            ports = tuple(replace(port, state="DOWN", rate=10.0, gids=()) for port in ports)
        return replace(hca, ports=ports, default_route=hca.name == case.route)

    hcas = [turn(hca) for hca in fabric.hcas]
    random.Random(repr(case)).shuffle(hcas)
    return replace(fabric, hcas=tuple(hcas))


def check(fabric: Fabric, healthy: Choice, case: Case) -> None:
    """Raises AssertionError where a property does not hold."""
    now = state(fabric, case)
    choice = choose(now)
    rails = {hca.name for hca in healthy.usable}
    usable = {hca.name for hca in choice.usable}
    assert usable <= rails, f"{case}: {usable - rails} are no rails"
    alive = rails - set(case.dead)
    assert alive - usable <= {case.route}, f"{case}: rails {alive - usable} are left out"
    for before, after in zip(healthy.gpus, choice.gpus, strict=True):
        assert bool(after.hcas) == bool(alive), f"{case}: {after}"
        if not after.hcas:
            continue
        ranks = {name: fabric.distances[after.gpu.address, name] for name in usable}
        known = [rank for rank in ranks.values() if rank is not None]
        assert after.distance == min(known, default=None), f"{case}: {after} is not the nearest rail"
        told = any(line.startswith(f"{after.gpu.name} is degraded") for line in choice.degraded)
        farther = before.distance is not None and after.distance is not None and after.distance > before.distance
        assert told or not farther or case.route in before.hcas, f"{case}: {after} says nothing"
    assert choose(replace(now, hcas=tuple(reversed(now.hcas)), gpus=tuple(reversed(now.gpus)))) == choice, str(case)


def main() -> None:
    total = 0
    for machine in MACHINES:
        with tempfile.TemporaryDirectory() as root:
            fabric = read_machine(machine, Path(root))
        healthy = choose(fabric)
        count = 0
        for case in cases(fabric):
            check(fabric, healthy, case)
            count += 1
        print(f"{machine}: {count} cases")
        total += count
    print(f"{total} cases")


if __name__ == "__main__":
    main()
