"""What may be freed while somebody reads blocks."""

from __future__ import annotations

import numpy as np

from transfer_queue.runtime.pins import Pins


def test_without_a_holder_everything_may_be_freed() -> None:
    pins = Pins()
    assert pins.spare(1, [5, 6]) == [5, 6]
    assert pins.release("nobody") == {}


def test_held_blocks_are_freed_after_their_last_holder() -> None:
    pins = Pins()
    pins.hold("a", np.array([5, 8], np.uint64))
    pins.hold("b", np.array([5, 6], np.uint64))
    assert pins.spare(1, [5, 6, 7]) == [7]
    assert pins.spare(2, [4, 8, 9]) == [4, 9]
    assert pins.release("a") == {2: [8]}
    assert {unit: sorted(blocks) for unit, blocks in pins.release("b").items()} == {1: [5, 6]}
    assert pins.spare(1, [5]) == [5]


def test_until_the_held_blocks_are_known_nothing_is_freed() -> None:
    pins = Pins()
    pins.hold("a", None)
    assert pins.spare(1, [5, 6]) == []
    pins.hold("a", np.array([5], np.uint64))
    assert pins.spare(1, [6, 7]) == [6, 7]
    assert {unit: sorted(blocks) for unit, blocks in pins.release("a").items()} == {1: [5, 6]}
