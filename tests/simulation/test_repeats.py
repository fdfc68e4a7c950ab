"""Requests that come twice, or late: each takes effect once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation.world import Link, World
from transfer_queue.control.commands import Batch, BlockRef, Commit, Committed, Fetch
from transfer_queue.control.schema import FieldSchema
from transfer_queue.wire.messages import Failure, Hello

X = [FieldSchema("x", "dense", "float32", ())]


class Peer:
    name = "peer"

    def __init__(self, world: World) -> None:
        self.world = world
        self.answers: list[tuple[int, Any]] = []
        self.link: Link = world.connect(self, Hello("client", "peer"))
        self.writer = self.wait()[0][1].writer

    def receive(self, link: Link, kind: int, request: int, message: Any) -> None:
        if request:
            self.answers.append((request, message))

    def cut_off(self, link: Link) -> None:
        raise AssertionError("the connection was cut")

    def put(self, number: int, floor: int) -> None:
        block = BlockRef(0, (self.writer << 32) | number, 0, 1, 4)
        self.link.request(number, Commit("p", append=1, fields=X, blocks=[block]), floor)

    def wait(self) -> list[tuple[int, Any]]:
        """What came in the next ten seconds."""
        self.answers = []
        until = self.world.clock.now + 10
        while self.world.clock.now < until:
            assert self.world.clock.step()
        return self.answers

    @property
    def rows(self) -> int:
        return self.world.server.controller.core.state.rows


@pytest.fixture
def peer() -> Iterator[Peer]:
    world = World(1)
    yield Peer(world)
    world.close()


def test_a_request_that_comes_again_gets_the_same_answer(peer: Peer) -> None:
    peer.put(1000, 1000)
    peer.put(1000, 1000)
    first, second = peer.wait()
    assert first == second
    assert isinstance(first[1], Committed)
    assert peer.rows == 1


def test_a_request_that_comes_after_its_answer_was_settled_is_not_carried_out_again(peer: Peer) -> None:
    peer.put(1000, 1000)
    peer.put(1001, 1001)
    peer.put(1000, 1000)
    answers = peer.wait()
    assert [number for number, _ in answers] == [1000, 1001, 1000]
    assert isinstance(answers[2][1], Failure)
    assert "settled" in answers[2][1].text
    assert peer.rows == 2


def test_a_waiting_fetch_that_comes_again_is_answered_once_and_takes_rows_once(peer: Peer) -> None:
    for _ in range(2):
        peer.link.request(1000, Fetch("p", fields=["x"], batch_size=1, task="t", timeout_s=100), 1000)
    assert peer.wait() == []
    peer.put(1001, 1000)
    peer.put(1002, 1000)
    taken = [answer for number, answer in peer.wait() if number == 1000]
    assert len(taken) == 1
    assert isinstance(taken[0], Batch)
    peer.link.request(1003, Fetch("p", fields=["x"], batch_size=1, task="t", timeout_s=0), 1003)
    left = peer.wait()[0][1]
    assert isinstance(left, Batch)
    assert left.indexes != taken[0].indexes
