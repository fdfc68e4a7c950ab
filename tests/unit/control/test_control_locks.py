"""Locks: exclusion, order, ends, numbers, and puts that depend on them or on what a row has."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from transfer_queue.control.commands import BlockRef, Clear, Commit, Lock, RenewLock, Value
from transfer_queue.control.core import ControlCore
from transfer_queue.control.effects import PARKED, Answer, Journal
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import InvalidInputError, LockLostError, RowChangedError, WaitTimeoutError


class Host:
    """Drives a core; ``answers``: (client, request) -> the number of its lock, or its error."""

    def __init__(self, *, journal: bool = False) -> None:
        self.core = ControlCore(journal=journal)
        self.now = 0.0
        self.requests = 0
        self.answers: dict[tuple[int, int], Any] = {}
        self.records: list[Any] = []

    def lock(self, client: int, *keys: str, wait_s: float = math.inf, lease_s: float = 30.0) -> tuple[int, int]:
        self.requests += 1
        command = Lock("p", list(keys), wait_s, lease_s)
        reply = self.core.apply(command, self.now, client=client, request=self.requests)
        if reply is not PARKED:
            self.answers[client, self.requests] = reply.value["lock"]
        return client, self.requests

    def end(self, client: int, number: int, lease_s: float = 0.0) -> bool:
        self.requests += 1
        reply = self.core.apply(RenewLock("p", number, lease_s), self.now, client=client, request=self.requests)
        self.settle()
        assert isinstance(reply, Value)
        return bool(reply.value)

    def settle(self) -> None:
        for effect in self.core.drain_effects():
            if isinstance(effect, Answer):
                found = effect.reply.value["lock"] if isinstance(effect.reply, Value) else effect.error
                self.answers[effect.client, effect.request] = found
            elif isinstance(effect, Journal):
                self.records.append(effect.record)
        self.core.validate_state()

    def tick(self, now: float) -> None:
        self.now = now
        self.core.tick(now)
        self.settle()


def test_a_key_has_one_holder_and_the_next_is_the_one_that_came_first() -> None:
    host = Host()
    first, second, third = (host.lock(client, "a") for client in (1, 2, 3))
    host.settle()
    assert host.answers == {first: 1}
    assert host.end(1, 1)
    assert host.answers[second] == 2
    assert third not in host.answers
    assert host.end(2, 2)
    assert host.answers[third] == 3
    assert not host.end(1, 1)  # once


def test_locks_of_several_keys_are_granted_whole_and_without_a_circle() -> None:
    host = Host()
    host.lock(1, "a")
    both = host.lock(2, "b", "a")
    behind = host.lock(3, "b")  # free, but an earlier request wants it
    host.settle()
    assert both not in host.answers
    assert behind not in host.answers
    host.end(1, 1)
    assert host.answers[both] == 2
    host.end(2, 2)
    assert host.answers[behind] == 3


def test_a_lock_ends_with_its_lease_unless_renewed_and_with_its_connection() -> None:
    host = Host()
    host.lock(1, "a", lease_s=10.0)
    waiting = host.lock(2, "a", lease_s=10.0)
    host.now = 8.0
    assert host.end(1, 1, lease_s=10.0)
    host.tick(17.9)
    assert waiting not in host.answers
    host.tick(18.0)
    assert host.answers[waiting] == 2
    last = host.lock(3, "a")
    host.core.disconnected(2, host.now)
    host.settle()
    assert host.answers[last] == 3
    assert host.core.next_deadline() == 18.0 + 30.0


def test_a_wait_that_is_over_names_who_is_ahead_and_lets_those_behind_go_on() -> None:
    host = Host()
    host.lock(1, "a")
    late = host.lock(2, "a", "b", wait_s=5.0)
    behind = host.lock(3, "b")
    host.tick(5.0)
    assert isinstance(host.answers[late], WaitTimeoutError)
    assert "within 5 s; client 1 holds or waits for ['a']" in str(host.answers[late])
    assert host.answers[behind] == 2
    with pytest.raises(WaitTimeoutError):
        host.lock(4, "a", wait_s=0.0)
    host.settle()


def test_a_withdrawn_request_never_holds_also_where_its_lock_was_granted() -> None:
    host = Host()
    client, request = host.lock(1, "a")
    waiting, gone = host.lock(2, "a"), host.lock(3, "a")
    host.core.cancel(*gone, host.now)
    host.core.cancel(client, request, host.now)
    host.settle()
    assert host.answers[waiting] == 2
    assert gone not in host.answers


def put(host: Host, client: int, key: str, block: int, **conditions: Any) -> None:
    fields = [FieldSchema("x", "dense", "int64", ())]
    commit = Commit("p", keys=[key], fields=fields, blocks=[BlockRef(0, block, 0, 1, 8)], **conditions)
    host.core.apply(commit, host.now, client=client, request=10_000 + block)


def test_a_put_with_a_lock_that_has_ended_changes_nothing() -> None:
    host = Host()
    host.lock(1, "a", lease_s=5.0)
    put(host, 1, "a", 7, lock=1)
    host.tick(5.0)
    before = host.core.fingerprint()
    for client in (1, 2):
        with pytest.raises(LockLostError, match="lock 1 of partition 'p' has ended"):
            put(host, client, "a", 8, lock=1)
    assert host.core.fingerprint() == before
    host.lock(2, "a")
    with pytest.raises(LockLostError):
        put(host, 1, "a", 9, lock=2)  # another client's
    put(host, 2, "a", 9, lock=2)


def test_a_put_that_expects_cells_is_refused_once_they_changed() -> None:
    host = Host()
    put(host, 1, "a", 7)
    put(host, 1, "a", 8, expects={"x": 7})
    before = host.core.fingerprint()
    for expects in ({"x": 7}, {"x": 0}, {"x": 8, "y": 3}):
        with pytest.raises(RowChangedError):
            put(host, 1, "a", 9, expects=expects)
    with pytest.raises(RowChangedError):
        put(host, 1, "no such row", 9, expects={"x": 0})
    assert host.core.fingerprint() == before
    put(host, 1, "a", 9, expects={"x": 8, "y": 0})
    host.core.apply(Clear("p", keys=["a"]), host.now)
    with pytest.raises(RowChangedError):
        put(host, 1, "a", 10, expects={"x": 9})


def test_wrong_arguments_are_refused() -> None:
    host = Host()
    for keys, lease_s in (([], 1.0), (["a", "a"], 1.0), (["a"], 0.0), (["a"], math.inf)):
        with pytest.raises(InvalidInputError):
            host.lock(1, *keys, lease_s=lease_s)
    host.settle()


def test_a_restarted_controller_has_the_same_locks_and_higher_numbers() -> None:
    host = Host(journal=True)
    host.lock(1, "a", lease_s=5.0)
    host.lock(2, "b", "c")
    host.lock(3, "c")
    host.end(1, 1)
    host.settle()
    replayed, restored = ControlCore(), ControlCore()
    replayed.replay(host.records)
    restored.restore(host.core.snapshot())
    for core in (replayed, restored):
        assert core.fingerprint() == host.core.fingerprint()
        core.restart_leases(100.0)
        core.validate_state()
        assert core.next_deadline() == 130.0
        assert core.apply(Lock("p", ["a"]), 100.0, client=4, request=1) == Value({"lock": 3, "waited": 0.0})


@pytest.mark.parametrize("seed", range(20))
def test_no_key_ever_has_two_holders_and_nobody_waits_for_ever(seed: int) -> None:
    host, chance = Host(journal=True), random.Random(seed)
    wanted: dict[tuple[int, int], list[str]] = {}
    ended: set[int] = set()
    for _ in range(300):
        host.now += chance.random()
        step = chance.randrange(10)
        held = {
            name: number for name, number in host.answers.items() if isinstance(number, int) and number not in ended
        }
        if step < 5:
            keys = chance.sample("abcd", chance.randint(1, 3))
            wanted[host.lock(chance.randint(1, 6), *keys, wait_s=chance.choice([3.0, math.inf]), lease_s=4.0)] = keys
        elif step < 8 and held:
            (client, _), number = chance.choice(sorted(held.items()))
            host.end(client, number)
        elif step == 8:
            host.core.disconnected(chance.randint(1, 6), host.now)
        host.tick(host.now)
        ended = set(range(1, 400)) - {claim.number for claim in host.core.state.locks._held.values()}
        names = [key for claim in host.core.state.locks._held.values() for key in claim.keys]
        assert len(names) == len(set(names))
    host.tick(host.now + 4.0 * (len(wanted) + 1)) if host.core.next_deadline() else None
    while (deadline := host.core.next_deadline()) is not None:
        host.tick(max(host.now, deadline))
    assert (host.core.state.locks.held, host.core.state.locks.waiting) == (0, 0)
    replayed = ControlCore()
    replayed.replay(host.records)
    assert replayed.fingerprint() == host.core.fingerprint()
