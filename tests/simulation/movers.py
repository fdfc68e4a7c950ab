"""Models of a mover and of clients that follow a partition from controller to controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tests.simulation.peers import PARTITION, Client, Unit
from tests.simulation.world import Link, World
from transfer_queue.control.blocks import COLUMNS
from transfer_queue.control.commands import BlockRef, Command, Commit, Moved, Value
from transfer_queue.control.directory import shard_of
from transfer_queue.control.moves import seal_of
from transfer_queue.wire.messages import Failure, Hello
from transfer_queue.wire.moves import Dismiss, Export, Leave, ListMoves, Receive, Settle

__all__ = ["FollowingClient", "Mover", "Shard"]

_AGAIN_S = 0.1


class Shard:
    """The world as peers of one controller see it."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_world", "number"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._world, name, value)

    def connect(self, peer: Any, hello: Hello) -> Link:
        return self._world.connect(peer, hello, self.number)


class _Session(Client):
    """A client at one controller, which passes on what that says has moved."""

    def __init__(self, shard: Shard, name: str, units: list[Unit], moved: Callable[..., None]) -> None:
        self._moved = moved
        super().__init__(shard, name, units)  # type: ignore[arg-type]

    def _request(self, command: Any, done: Callable[[Any], None]) -> None:
        def followed(reply: Any) -> None:
            if isinstance(reply, Moved):
                self._moved(command, reply, done)
            else:
                done(reply)

        super()._request(command, followed)


class FollowingClient:
    """One client of all controllers."""

    def __init__(self, world: World, name: str, units: list[list[Unit]]) -> None:
        self.world = world
        self.place = shard_of(PARTITION, world.shards)
        self.name = name
        self.sessions = [
            _Session(Shard(world, shard), name, units[shard], self._moved) for shard in range(world.shards)
        ]

    @property
    def here(self) -> _Session:
        return self.sessions[self.place]

    @property
    def dead(self) -> bool:
        return self.sessions[0].dead

    @property
    def idle(self) -> bool:
        return all(session.idle for session in self.sessions)

    @property
    def acknowledged(self) -> set[int]:
        return {row for session in self.sessions for row in session.acknowledged}

    @property
    def uncertain(self) -> set[int]:
        return {row for session in self.sessions for row in session.uncertain}

    def die(self) -> None:
        for session in self.sessions:
            session.die()

    def _moved(self, command: Command, moved: Moved, done: Callable[[Any], None]) -> None:
        if self.dead:
            return
        self.place = moved.shard
        target = self.here
        if isinstance(command, Commit):  # the block is stored again, for the other controller
            for unit in [unit for session in self.sessions for unit in session.units]:
                unit.drop(command.blocks[0].block)

            def go_on() -> None:
                self._put_again(target, [int(key) for key in command.keys or ()])

        else:

            def go_on() -> None:
                if target.ready:
                    target._request(command, done)
                elif not self.dead:
                    self.world.clock.call_later(_AGAIN_S, go_on)

        if moved.proof:
            self._show(target, moved.proof, go_on)
        else:
            self.world.clock.call_later(_AGAIN_S, go_on)

    def _show(self, target: _Session, proof: str, go_on: Callable[[], None]) -> None:
        if self.dead:
            return
        if not target.ready:
            self.world.clock.call_later(_AGAIN_S, self._show, target, proof, go_on)
            return
        target._request(Settle(PARTITION, proof), lambda reply: go_on())  # type: ignore[arg-type]

    def _put_again(self, target: _Session, rows: list[int]) -> None:
        if self.dead:
            return
        if target.ready and len(target._pending) <= 3:
            target.put(rows)
        else:
            self.world.clock.call_later(_AGAIN_S, self._put_again, target, rows)


class Mover:
    """Moves the partition to the controller that does not have it, if nobody kills it on the way.

    It begins with what earlier movers left, and with ``only_settle`` that is all.
    """

    def __init__(
        self, world: World, name: str, units: list[list[Unit]], *, only_settle: bool = False, steps: int = 1000
    ) -> None:
        self.world = world
        self.name = name
        self.steps = steps
        """Answers after which it is killed."""
        self.left = self.dead = False
        self._only_settle = only_settle
        self._units = units
        self._links: list[Link] = []
        self._writers: dict[int, int] = {}
        self._waiting: dict[tuple[Link, int], Callable[[Any], None]] = {}
        self._next = 2
        self._next_block = 1
        self._unsettled: list[int] = []
        self._here: dict[int, list[str]] = {}
        for shard in range(world.shards):
            self._links.append(world.connect(self, Hello("client", name), shard))

    # ------------------------------------------------------------------------------------------------------ network

    def cut_off(self, link: Link) -> None:
        self.die()

    def receive(self, link: Link, kind: int, request: int, message: Any) -> None:
        if self.dead:
            return
        if request == 1:
            self._writers[self._links.index(link)] = message.writer
            if len(self._writers) == len(self._links):
                self._settle_all(list(range(len(self._links))))
        elif (done := self._waiting.pop((link, request), None)) is not None:
            self.steps -= 1
            if self.steps <= 0 or isinstance(message, Failure):
                self.world.note(f"{self.name} ends: {message if isinstance(message, Failure) else 'killed'}")
                self.die()
            else:
                done(message)

    def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        for link in self._links:
            link.cut()
        for shard, writer in self._writers.items():
            for unit in self._units[shard]:
                self.world.clock.call_later(self.world.delay(), unit.writer_gone, writer)

    def _ask(self, shard: int, message: Any, done: Callable[[Any], None], payload: bytes | None = None) -> None:
        self._next += 1
        self._waiting[self._links[shard], self._next] = done
        self._links[shard].request(self._next, message, 0, payload)

    # ------------------------------------------------------------------------------------------------------ the move

    def _settle_all(self, left: list[int]) -> None:
        if not left:
            self._choose()
            return
        shard = left[0]

        def listed(reply: Value) -> None:
            self._here[shard] = reply.value["here"]
            found = reply.value["arriving"].get(PARTITION)
            if found is None:
                self._settle_all(left[1:])
            else:
                self._ask(found[0], ListMoves(), lambda said: self._settle(shard, found[1], said, left[1:]))

        self._ask(shard, ListMoves(), listed)

    def _settle(self, target: int, seal: str, said: Value, left: list[int]) -> None:
        shard, proof = said.value["away"].get(PARTITION, (-1, ""))
        if shard == target and seal_of(proof) == seal:
            self._ask(target, Settle(PARTITION, proof), lambda reply: self._settle_all([target, *left]))
        elif said.value["leaving"].get(PARTITION) != seal:
            self._ask(target, Dismiss(PARTITION, seal), lambda reply: self._settle_all([target, *left]))
        else:
            self.die()

    def _choose(self) -> None:
        if self._only_settle:
            self.die()
            return
        hosts = [shard for shard, names in self._here.items() if PARTITION in names]
        source = hosts[0] if hosts else shard_of(PARTITION, len(self._links))
        target = (source + 1) % len(self._links)
        self._ask(source, Export(PARTITION, hold=True), lambda reply: self._copy(source, target, reply))

    def _copy(self, source: int, target: int, reply: tuple[Any, bytes]) -> None:
        exported = msgspec.msgpack.decode(reply[1])
        state = exported["state"]
        table = state["blocks"]
        columns = {name: np.frombuffer(table[name], COLUMNS[name]).tolist() for name in ("unit", "block")}
        for slot in range(1, table["used"]):
            rows = self._rows(source, columns["unit"][slot], columns["block"][slot])
            unit = self.world.random.choice([unit for unit in self._units[target] if unit.number >= 0] or [None])
            if rows is None or unit is None:
                self.die()
                return
            ref = BlockRef(unit.number, self._writers[target] << 32 | self._next_block, 0, 0, 0)
            self._next_block += 1
            unit.blocks[ref.block] = rows
            columns["unit"][slot], columns["block"][slot] = ref.unit, ref.block
        renamed = {name: np.array(values, COLUMNS[name]).tobytes() for name, values in columns.items()}
        content = msgspec.msgpack.encode({**state, "blocks": {**table, **renamed}, "clients": exported["clients"]})
        receive = Receive(PARTITION, exported["seal"], source)

        def send() -> None:
            if not self.dead:
                self._ask(target, receive, lambda reply: self._leave(source, target, exported["seal"]), content)

        self.world.clock.call_later(self.world.delay(), send)

    def _rows(self, shard: int, number: int, block: int) -> list[int] | None:
        unit = next((unit for unit in self._units[shard] if unit.number == number), None)
        return None if unit is None else unit.blocks.get(block)

    def _leave(self, source: int, target: int, seal: str) -> None:
        def left(reply: Value) -> None:
            self.world.note(f"{self.name}: the partition has left {source}")
            self.left = True
            self._ask(target, Settle(PARTITION, reply.value), settled)

        def settled(reply: Any) -> None:
            self.world.note(f"{self.name}: the partition is on {target}")
            self.die()

        self._ask(source, Leave(PARTITION, seal, target), left)
