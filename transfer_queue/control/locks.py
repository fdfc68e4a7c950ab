"""Locks: names within a partition that one client at a time holds, first come, first served.

A lock is a number of names that are taken and given back together. It ends when its client gives it back, when the
client's connection ends, or when its lease is over. Its number grows with every lock that a controller grants: a put
that carries it is refused once the lock has ended (fencing), so that a holder that was held up cannot overwrite what
the next one wrote.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from transfer_queue.control.commands import Lock, RenewLock, Value
from transfer_queue.control.effects import PARKED, EffectLog, Parked
from transfer_queue.control.records import LockEnded, LockGranted
from transfer_queue.errors import InvalidInputError, LockLostError, RequestError, WaitTimeoutError

__all__ = ["Claim", "Lines", "Locks"]

C = TypeVar("C", bound=Hashable)


class Lines(Generic[C]):
    """A line for each name. A claim joins the lines of all its names at once and holds them when it is first in each.

    So nobody is overtaken by a later claim of the same name, and claims of several names never wait for each other in a
    circle: all lines have the same order.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, dict[C, None]] = {}

    def join(self, claim: C, names: Sequence[Hashable]) -> bool:
        """Returns whether the claim holds its names now."""
        for name in names:
            self._lines.setdefault(name, {})[claim] = None
        return self.holds(claim, names)

    def holds(self, claim: C, names: Sequence[Hashable]) -> bool:
        return all(next(iter(self._lines[name])) is claim for name in names)

    def leave(self, claim: C, names: Sequence[Hashable]) -> list[C]:
        """Take a claim out, held or not. Returns those that have come to the front of a line by that, in the order of
        the names; each may now hold its names."""
        followers: dict[C, None] = {}
        for name in names:
            line = self._lines[name]
            was_first = next(iter(line)) is claim
            del line[claim]
            if not line:
                del self._lines[name]
            elif was_first:
                followers[next(iter(line))] = None
        return list(followers)

    def first(self, name: Hashable) -> C | None:
        return next(iter(self._lines.get(name, ())), None)


class Claim:
    """What one request asked for. ``number`` 0: it waits. ``deadline``: when the wait or the lease ends, by the host's
    clock."""

    __slots__ = ("client", "deadline", "keys", "lease_s", "number", "partition", "request", "since")

    def __init__(self, partition: str, keys: list[str], client: int, request: int, lease_s: float) -> None:
        self.partition = partition
        self.keys = keys
        self.client = client
        self.request = request
        self.lease_s = lease_s
        self.number = 0
        self.since = 0.0
        self.deadline = math.inf

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(self.partition, key) for key in self.keys]


class Locks:
    """All locks of one controller, and who waits for them."""

    def __init__(self, log: EffectLog) -> None:
        self._log = log
        self._lines: Lines[Claim] = Lines()
        self._claims: dict[tuple[int, int], Claim] = {}
        self._held: dict[int, Claim] = {}
        self._deadlines: list[tuple[float, int, Claim]] = []
        self._pushed = 0
        self._next = 1

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._claims) - len(self._held)

    def keys_of(self, partition: str) -> list[str]:
        """Keys of a partition that somebody holds or waits for."""
        return [key for claim in self._claims.values() if claim.partition == partition for key in claim.keys]

    # ----------------------------------------------------------------------------------------------------- commands

    def lock(self, command: Lock, now: float) -> Value | Parked:
        client, request = self._log.origin
        if not command.keys or len(set(command.keys)) != len(command.keys):
            raise InvalidInputError(f"a lock needs one or more keys, each once; got {command.keys}")
        if not 0 < command.lease_s < math.inf:
            raise InvalidInputError(f"lease_s must be a positive number of seconds; got {command.lease_s:g}")
        if (client, request) in self._claims:
            raise RequestError(f"request {request} of client {client} is waiting already, or holds its lock")
        claim = Claim(command.partition, list(command.keys), client, request, command.lease_s)
        claim.since = now
        self._claims[client, request] = claim
        if self._lines.join(claim, claim.names):
            return self._grant(claim, now)
        if not command.wait_s > 0:
            error = self._timeout_error(claim, 0.0)
            self._end(claim, now)
            raise error
        self._expect(claim, now + command.wait_s)
        return PARKED

    def renew(self, command: RenewLock, now: float) -> Value:
        claim = self._held.get(command.lock)
        if claim is None or claim.client != self._log.origin[0] or claim.partition != command.partition:
            return Value(False)
        if command.lease_s > 0:
            claim.lease_s = command.lease_s
            self._expect(claim, now + command.lease_s)
        else:
            self._end(claim, now)
        return Value(True)

    def is_held(self, number: int) -> bool:
        return number in self._held

    def check(self, partition: str, number: int, client: int) -> None:
        """Raises LockLostError unless ``client`` holds lock ``number`` of the partition."""
        claim = self._held.get(number)
        if claim is None or claim.client != client or claim.partition != partition:
            raise LockLostError(
                f"lock {number} of partition {partition!r} has ended: its lease was over, or its client's connection "
                "was lost; nothing was put. Lock again and read again"
            )

    # -------------------------------------------------------------------------------------------------- host's calls

    def withdraw(self, client: int, request: int | None, now: float) -> None:
        """The client does not want the answer of a request, or (None) of any request that waits."""
        if request is not None:
            found = [claim for claim in [self._claims.get((client, request))] if claim is not None]
        else:
            found = [claim for claim in self._claims.values() if claim.client == client and not claim.number]
        self._end_all(found, now)

    def disconnected(self, client: int, now: float) -> None:
        """The client's connection ended, and with it its locks."""
        self._end_all([claim for claim in self._claims.values() if claim.client == client], now)

    def next_deadline(self) -> float | None:
        while self._deadlines:
            deadline, _, claim = self._deadlines[0]
            if self._claims.get((claim.client, claim.request)) is claim and claim.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def tick(self, now: float) -> None:
        """End leases that are over, and answer waits that are over with an error."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, _, claim = heapq.heappop(self._deadlines)
            if not claim.number:
                self._log.answer(claim.client, claim.request, self._timeout_error(claim, deadline - claim.since))
            self._end(claim, now)

    # ------------------------------------------------------------------------------------------------------- changes

    def _grant(self, claim: Claim, now: float) -> Value:
        claim.number = self._next
        self._next += 1
        self._held[claim.number] = claim
        self._expect(claim, now + claim.lease_s)
        if self._log.journaling:
            self._log.record(
                LockGranted(claim.partition, claim.keys, claim.number, claim.client, claim.request, claim.lease_s)
            )
        return Value({"lock": claim.number, "waited": now - claim.since})

    def _end(self, claim: Claim, now: float) -> None:
        self._end_all([claim], now)

    def _end_all(self, claims: list[Claim], now: float) -> None:
        """All of them, before those behind them go on."""
        followers: dict[Claim, None] = {}
        for claim in claims:
            del self._claims[claim.client, claim.request]
            if claim.number:
                del self._held[claim.number]
                if self._log.journaling:
                    self._log.record(LockEnded(claim.number))
            followers.update(dict.fromkeys(self._lines.leave(claim, claim.names)))
        for claim in followers:
            alive = self._claims.get((claim.client, claim.request)) is claim
            if alive and not claim.number and self._lines.holds(claim, claim.names):
                self._log.origin = (claim.client, claim.request)
                self._log.answer(claim.client, claim.request, self._grant(claim, now))

    def _expect(self, claim: Claim, deadline: float) -> None:
        claim.deadline = deadline
        if deadline < math.inf:
            self._pushed += 1
            heapq.heappush(self._deadlines, (deadline, self._pushed, claim))
            if len(self._deadlines) > 2 * len(self._claims) + 64:
                live = [entry for entry in self._deadlines if entry[2].deadline == entry[0] and self._lives(entry[2])]
                self._deadlines = live
                heapq.heapify(self._deadlines)

    def _lives(self, claim: Claim) -> bool:
        return self._claims.get((claim.client, claim.request)) is claim

    def _timeout_error(self, claim: Claim, waited: float) -> WaitTimeoutError:
        ahead = self._lines.first(next(name for name in claim.names if self._lines.first(name) is not claim))
        held = f"client {ahead.client} holds or waits for {ahead.keys}" if ahead is not None else "others wait"
        return WaitTimeoutError(
            f"Timeout: no lock of {claim.keys} in partition {claim.partition!r} within {waited:g} s; {held}"
        )

    # -------------------------------------------------------------------------------------------------- durability

    def dump(self) -> dict[str, Any]:
        claims = [self._held[number] for number in sorted(self._held)]
        return {
            "next": self._next,
            "held": [[c.partition, c.keys, c.number, c.client, c.request, c.lease_s] for c in claims],
        }

    def load(self, state: dict[str, Any]) -> None:
        for partition, keys, number, client, request, lease_s in state.get("held", ()):
            self.restore(partition, list(keys), number, client, request, lease_s)
        self._next = max(self._next, state.get("next", 1))

    def restore(self, partition: str, keys: list[str], number: int, client: int, request: int, lease_s: float) -> None:
        """A lock of a former life; ``restart`` sets its deadline."""
        claim = Claim(partition, keys, client, request, lease_s)
        claim.number = number
        self._claims[client, request] = self._held[number] = claim
        if not self._lines.join(claim, claim.names):
            raise RequestError(f"lock {number} of {keys} in partition {partition!r} is held twice")
        self._next = max(self._next, number + 1)

    def forget(self, number: int) -> None:
        """In replay: the lock ended."""
        if claim := self._held.pop(number, None):
            del self._claims[claim.client, claim.request]
            self._lines.leave(claim, claim.names)

    def restart(self, now: float) -> None:
        """All leases count from now on: the clock is another one."""
        for claim in self._held.values():
            self._expect(claim, now + claim.lease_s)

    def describe(self) -> Iterator[str]:
        """Yield one line a lock."""
        for number in sorted(self._held):
            claim = self._held[number]
            whose = f"client {claim.client} has {claim.keys} of {claim.partition!r}"
            yield f"lock {number}: {whose} for {claim.lease_s:g} s"

    def describe_waiters(self) -> Iterator[str]:
        """Yield one line a request that waits for a lock."""
        for claim in self._claims.values():
            if not claim.number:
                yield f"client {claim.client} request {claim.request} waits for {claim.keys} of {claim.partition!r}"

    def validate(self) -> None:
        """AssertionError if the state contradicts itself: nobody waits who could hold, and each name has one holder."""
        for claim in self._claims.values():
            assert self._lines.holds(claim, claim.names) == bool(claim.number)
        assert {claim.number: claim for claim in self._claims.values() if claim.number} == self._held
