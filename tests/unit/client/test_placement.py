"""Which storage unit a block goes to."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from transfer_queue.client.placement import Placement
from transfer_queue.storage.base import UnitInfo


def placement(units: int) -> Placement:
    made = Placement(seed=0)
    made.update([UnitInfo(number, f"unit-{number}", f"host:{number}", 1 << 30) for number in range(units)])
    return made


def first_choices(made: Placement, nbytes: int, count: int) -> list[int]:
    return [made.candidates(nbytes)[0].unit for _ in range(count)]


def test_large_blocks_take_turns() -> None:
    choices = first_choices(placement(3), 1 << 20, 6)
    assert choices[:3] == choices[3:]
    assert sorted(choices[:3]) == [0, 1, 2]


def test_small_blocks_stay_together_and_still_spread_over_all_units() -> None:
    choices = first_choices(placement(3), 1024, 3 * 256)
    changes = sum(a != b for a, b in pairwise(choices))
    assert changes == 3
    counts = Counter(choices)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_after_a_refusal_another_unit_comes_first() -> None:
    made = placement(2)
    refused = made.candidates(1024)[0]
    made.move_on()
    assert made.candidates(1024)[0] != refused
    assert sorted(info.unit for info in made.candidates(1024)) == [0, 1]
