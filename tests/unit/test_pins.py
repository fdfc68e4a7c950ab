"""What may be freed while somebody reads blocks."""

from __future__ import annotations

from transfer_queue.runtime.pins import Pins


def test_without_a_holder_everything_may_be_freed() -> None:
    pins = Pins()
    assert pins.spare(1, [5, 6]) == [5, 6]
    assert pins.release("nobody") == {}


def test_held_blocks_are_freed_after_their_last_holder() -> None:
    pins = Pins()
    pins.hold("a", [(1, 5), (2, 5)])
    pins.hold("b", [(1, 5), (1, 6)])
    assert pins.spare(1, [5, 6, 7]) == [7]
    assert pins.spare(2, [6]) == [6]
    assert pins.release("a") == {}
    assert {unit: sorted(blocks) for unit, blocks in pins.release("b").items()} == {1: [5, 6]}
    assert pins.spare(1, [5]) == [5]
