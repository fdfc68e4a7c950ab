"""A unit says what it holds when it joins: in pieces that fit into a frame, and damaged lists are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.core import ControlCore
from transfer_queue.errors import RequestError
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.units import Joining, pack_blocks, unpack_blocks
from transfer_queue.wire.messages import Hello, Join


def join(blocks: bytes, held: int) -> Join:
    return Join("u0", "i", "127.0.0.1:1", 1 << 20, 0, blocks, {}, held)


async def test_what_is_freed_while_a_unit_is_away_goes_as_it_comes_back_and_what_may_be_committed_stays() -> None:
    controller = Controller(ControllerConfig(), ControlCore(), asyncio.get_running_loop())

    def line() -> Any:
        return SimpleNamespace(principal=None)

    client = Connection(controller, msgspec.msgpack.Decoder(), Keepalive(60.0, 60.0))
    first = controller.welcome(client, Hello("client", "writer")).writer << 32
    controller.gone(client)  # its session stays for a while
    before, units = line(), controller.units
    unit = units.join(before, join(b"", 0), [], 0.0).unit
    units.disconnected(before.context, before, 0.5)
    units.free(unit, [first])
    again = line()
    assert unpack_blocks(units.join(again, join(b"", 2), [first, first + 1], 1.0).unknown) == [first]
    units.disconnected(again.context, again, 1.5)
    units.free(unit, [first + 2])  # stored and committed since the unit made its list, so it is not in the list
    assert unpack_blocks(units.join(line(), join(b"", 1), [first + 1], 2.0).unknown) == [first + 2]


def test_pieces_and_the_rest_make_the_inventory() -> None:
    joining = Joining()
    joining.add(pack_blocks([1, 2]))
    joining.add(pack_blocks([3]))
    assert joining.inventory(join(pack_blocks([4]), 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize(("blocks", "held"), [(b"seven by", 2), (b"1234567", 1)], ids=["a piece missing", "cut short"])
def test_a_damaged_list_is_refused(blocks: bytes, held: int) -> None:
    with pytest.raises(RequestError, match=r"listed|8 bytes each"):
        Joining().inventory(join(blocks, held))
