"""A unit says what it holds when it joins: in pieces that fit into a frame, and damaged lists are refused."""

from __future__ import annotations

import pytest

from transfer_queue.errors import RequestError
from transfer_queue.runtime.units import Joining, pack_blocks
from transfer_queue.wire.messages import Join


def join(blocks: bytes, held: int) -> Join:
    return Join("u0", "i", "127.0.0.1:1", 1 << 20, 0, blocks, {}, held)


def test_pieces_and_the_rest_make_the_inventory() -> None:
    joining = Joining()
    joining.add(pack_blocks([1, 2]))
    joining.add(pack_blocks([3]))
    assert joining.inventory(join(pack_blocks([4]), 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize(("blocks", "held"), [(b"seven by", 2), (b"1234567", 1)], ids=["a piece missing", "cut short"])
def test_a_damaged_list_is_refused(blocks: bytes, held: int) -> None:
    with pytest.raises(RequestError, match=r"listed|8 bytes each"):
        Joining().inventory(join(blocks, held))
