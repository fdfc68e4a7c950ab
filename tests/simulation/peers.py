"""Models of the storage units and clients of a simulated queue: they speak the real messages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.world import Link, World
from transfer_queue.control.commands import (
    Acknowledge,
    Batch,
    BlockRef,
    Clear,
    Command,
    Commit,
    Committed,
    Done,
    Fetch,
    Lock,
    RenewLock,
    Value,
)
from transfer_queue.control.schema import FieldSchema
from transfer_queue.runtime.units import pack_blocks, unpack_blocks
from transfer_queue.wire.messages import Failure, FreeBlocks, Hello, Holding, Join, Joined, Kind, ReportOrphans, Welcome

__all__ = ["LEASING_TASK", "Client", "Unit"]

PARTITION, TASK, LEASING_TASK = "p", "train", "steady"
_RETRY_S = 0.2


class Unit:
    """Keeps blocks as the durability ``process`` says: a restart loses none that it acknowledged."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.number = -1
        self.blocks: dict[int, list[int]] = {}
        """block -> numbers of its rows"""
        self.listed: list[int] = []
        self.link: Link | None = None
        self._connect()

    def _connect(self) -> None:
        self.link = self.world.connect(self, Hello("unit", self.name))

    def receive(self, link: Link, kind: int, request: int, message: Any) -> None:
        if isinstance(message, Welcome):
            held = self.listed = list(self.blocks)
            link.request(2, Join(self.name, self.name, f"{self.name}:1", 1 << 30, 0, pack_blocks(held), {}, len(held)))
        elif isinstance(message, Joined):
            self.number = message.unit
            self._free(unpack_blocks(message.unknown))
            link.notify(Holding(pack_blocks([block for block in self.blocks if block not in self.listed])))
        elif isinstance(message, FreeBlocks):
            self._free(unpack_blocks(message.blocks))

    def cut_off(self, link: Link) -> None:
        if link is self.link:
            self.link = None
            self.world.clock.call_later(self.world.delay() + _RETRY_S, self._connect)

    def writer_gone(self, writer: int) -> None:
        """Its client died: the controller says which of its blocks were never committed."""
        orphans = [block for block in self.blocks if block >> 32 == writer]
        if orphans and self.link is not None and not self.link.closed:
            self.link.notify(ReportOrphans(pack_blocks(orphans)))

    def drop(self, block: int) -> None:
        """Its writer will not commit it."""
        self.blocks.pop(block, None)

    def _free(self, blocks: list[int]) -> None:
        for block in blocks:
            self.blocks.pop(block, None)


class Client:
    """Puts numbered rows and fetches them, one request at a time of each kind, repeating what got no answer."""

    def __init__(
        self,
        world: World,
        name: str,
        units: list[Unit],
        repeats_under_new_ids: bool = False,
        lines: random.Random | None = None,
    ) -> None:
        """``lines``: the client sends some commits over further connections, as this says."""
        self.world = world
        self.name = name
        self.units = units
        self.link: Link | None = None
        self.line: Link | None = None
        self.line_ready = False
        self.lines = lines
        self.welcome = Welcome("controller")
        self.ready = False
        self.dead = False
        self.acknowledged: set[int] = set()
        self.uncertain: set[int] = set()
        """Rows of commits that this client gave up."""
        self._planted = repeats_under_new_ids
        self._pending: dict[int, tuple[Command, Callable[[Any], None], int]] = {}
        self._over: dict[Link, list[int]] = {}
        """Requests that were sent over lines."""
        self._next_request = 1000
        self._next_block = 1
        self._connect()

    # ------------------------------------------------------------------------------------------------------- session

    def _connect(self) -> None:
        if self.dead:
            return
        hello = Hello("client", self.name, writer=self.welcome.writer, run=self.welcome.run)
        self.link = self.world.connect(self, hello)

    def _open_line(self) -> None:
        if self.line is None and self.ready and not self.dead:
            hello = Hello("client", self.name, writer=self.welcome.writer, run=self.welcome.run, secondary=True)
            self.line, self.line_ready = self.world.connect(self, hello), False

    def cut_off(self, link: Link) -> None:
        if link is self.link:
            self.link, self.ready = None, False
            if self.dead:
                return
            self.world.clock.call_later(self.world.delay() + _RETRY_S, self._connect)
        elif self.lines is not None:
            if link is self.line:
                self.line = None
            for number in self._over.pop(link, []):  # what got no answer there is asked over the own connection
                if number in self._pending and self.ready:
                    self._ask_again(number, *self._pending[number])

    def receive(self, link: Link, kind: int, request: int, message: Any) -> None:
        if link is self.line and not self.line_ready:
            self.line_ready = isinstance(message, Welcome)
        elif isinstance(message, Welcome):
            if link is not self.link:  # of a line that was given up
                return
            self.line = None
            if message.writer != self.welcome.writer:
                self._leave_units()
            self.welcome, self.ready = message, True
            if self.lines is not None:
                self._open_line()
            for number, (command, done, writer) in list(self._pending.items()):
                if writer != message.writer and command.mutates:
                    del self._pending[number]
                    done(None)
                else:
                    self._ask_again(number, command, done, writer)
        elif kind == Kind.REPLY and request in self._pending:
            _, done, _ = self._pending.pop(request)
            done(message)

    def _ask_again(self, number: int, command: Command, done: Callable[[Any], None], writer: int) -> None:
        if self._planted:  # the bug: what was asked before is not recognised
            del self._pending[number]
            number, self._next_request = self._next_request, self._next_request + 1
            self._pending[number] = (command, done, writer)
        assert self.link is not None
        self.link.request(number, command, min(self._pending))

    def _request(self, command: Command, done: Callable[[Any], None]) -> None:
        number, self._next_request = self._next_request, self._next_request + 1
        self._pending[number] = (command, done, self.welcome.writer)
        assert self.link is not None
        if self.lines is not None:
            self._open_line()
        if self.lines is None or self.line is None or not self.line_ready or not isinstance(command, Commit):
            self.link.request(number, command, min(self._pending))
            return
        self._over.setdefault(self.line, []).append(number)
        stopped_s = self.lines.choice((0.0, 8.0))  # the process is stopped just before it sends
        self.world.clock.call_later(stopped_s, self.line.request, number, command, min(self._pending))

    # -------------------------------------------------------------------------------------------------------- actions

    @property
    def idle(self) -> bool:
        return not self._pending

    def put(self, rows: list[int]) -> None:
        """Store a block on some unit, then commit it."""
        unit = self.world.random.choice(self.units)
        if not self.ready or unit.number < 0 or len(self._pending) > 3:
            return
        block = (self.welcome.writer << 32) | self._next_block
        self._next_block += 1
        unit.blocks[block] = rows
        ref = BlockRef(unit.number, block, 0, len(rows), 8 * len(rows))
        commit = Commit(
            PARTITION, keys=[str(row) for row in rows], fields=[FieldSchema("x", "dense", "int64", ())], blocks=[ref]
        )
        self.world.clock.call_later(self.world.delay(), self._commit, unit, commit, rows)

    def _commit(self, unit: Unit, commit: Commit, rows: list[int]) -> None:
        if self.dead or not self.ready or commit.blocks[0].block >> 32 != self.welcome.writer:
            self.world.clock.call_later(self.world.delay(), unit.drop, commit.blocks[0].block)
            return

        def done(reply: Any) -> None:
            if isinstance(reply, Committed):
                self.world.note(f"{self.name} put {rows}")
                self.acknowledged.update(rows)
            else:
                self.uncertain.update(rows)
                if isinstance(reply, Failure):
                    unit.drop(commit.blocks[0].block)

        self._request(commit, done)

    def fetch(self, count: int, wait_s: float | None = None) -> None:
        if not self.ready or len(self._pending) > 3:
            return

        def done(reply: Any) -> None:
            if isinstance(reply, Batch) and reply.keys:
                self.world.note(f"{self.name} got {reply.keys}")
                self.world.delivered.update(int(key) for key in reply.keys if key is not None)
            elif reply is None:
                self.world.abandoned += 1

        if wait_s is None:
            wait_s = self.world.random.choice((0.0, 0.5, 5.0))
        self._request(Fetch(PARTITION, ["x"], count, TASK, wait_s), done)

    def fetch_leased(self, count: int, wait_s: float | None = None) -> None:
        """Take rows at least once: work on them for a while, then acknowledge."""
        if not self.ready or len(self._pending) > 3:
            return
        chance = self.world.random

        def done(reply: Any) -> None:
            if isinstance(reply, Batch) and reply.keys:
                rows = {int(key) for key in reply.keys if key is not None}
                self.world.note(f"{self.name} works on {sorted(rows)}")
                command = Acknowledge(PARTITION, LEASING_TASK, reply.indexes)
                self.world.clock.call_later(chance.choice((0.0, 0.1, 1.0, 3.0)), self._acknowledge, command, rows)

        if wait_s is None:
            wait_s = chance.choice((0.0, 0.5, 5.0))
        lease_s = chance.choice((0.5, 2.0, math.inf))
        self._request(Fetch(PARTITION, ["x"], count, LEASING_TASK, wait_s, lease_s=lease_s), done)

    def _acknowledge(self, command: Acknowledge, rows: set[int]) -> None:
        if self.dead:
            return
        if not self.ready:
            self.world.clock.call_later(_RETRY_S, self._acknowledge, command, rows)
            return

        self.world.worked.update(rows)

        def done(reply: Any) -> None:
            if isinstance(reply, Done):
                self.world.note(f"{self.name} is done with {sorted(rows)}")
                self.world.finished.update(rows)

        self._request(command, done)

    def lock(self, keys: list[str], wait_s: float, lease_s: float, hold_s: float) -> None:
        """Hold a lock for a while, then give it back."""
        if not self.ready or len(self._pending) > 3:
            return

        def done(reply: Any) -> None:
            if isinstance(reply, Value):
                number = reply.value["lock"]
                self.world.note(f"{self.name} holds {keys} as {number}")
                assert number not in self.world.locks, f"lock {number} was granted to {self.world.locks[number]} before"
                self.world.locks[number] = self.name
                self.world.clock.call_later(hold_s, self._unlock, number)

        self._request(Lock(PARTITION, keys, wait_s, lease_s), done)

    def _unlock(self, number: int) -> None:
        if self.ready and not self.dead:
            self._request(RenewLock(PARTITION, number), lambda reply: None)

    def die(self) -> None:
        """Never to be heard of again. Its connections end, one after the other."""
        self.world.note(f"{self.name} is killed")
        self.dead = True
        self.world.abandoned += sum(
            isinstance(command, Fetch) and command.task == TASK for command, _, _ in self._pending.values()
        )
        for command, _, _ in self._pending.values():
            if isinstance(command, Commit):
                self.uncertain.update(int(key) for key in command.keys or ())
        self._pending.clear()
        if self.link is not None:  # the controller ends the line: it may be that the process is only stopped
            self.link.cut()
        self._leave_units()

    def _leave_units(self) -> None:
        late_s = 0.0 if self.lines is None else self.lines.choice((0.0, 5.0))  # after its session has ended
        for unit in self.units:
            self.world.clock.call_later(self.world.delay() + late_s, unit.writer_gone, self.welcome.writer)

    def clear(self, keys: list[str]) -> None:
        if self.ready and len(self._pending) <= 3:
            self._request(Clear(PARTITION, keys=keys), lambda reply: None)
