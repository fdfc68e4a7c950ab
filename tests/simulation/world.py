"""A queue in a virtual world: the real controller, its journal and its sessions, and models of units and clients, on a
virtual clock and a network that delays and loses. One seed is one history.

Messages within a connection keep their order, as TCP's do; connections break at any moment, which loses what was under
way in either direction. A crash of the controller loses what it had not written.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transfer_queue.config.processes import ControllerConfig, Timing
from transfer_queue.control.core import ControlCore
from transfer_queue.journal import Journal
from transfer_queue.journal.files import HEADER_BYTES
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.recovery import attach_journal
from transfer_queue.wire.messages import Failure, Hello, Kind

__all__ = ["Clock", "Link", "Server", "Timer", "World"]


class Timer:
    """A scheduled call; a TimerHandle to the controller."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """The part of an event loop that the controller uses, on virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(lambda: call(*arguments))
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), timer))
        return timer

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> Timer:
        return self.call_at(self.now + delay, call, *arguments)

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> Timer:
        return self.call_at(self.now, call, *arguments)

    def run_in_executor(self, executor: Any, work: Callable[..., None], *arguments: Any) -> _Done:
        """``executor(work)`` says when it is done and does it then."""
        done = _Done()
        executor(lambda: work(*arguments), done)
        return done

    def step(self) -> bool:
        """Run the next call; False if nothing is left."""
        while self._heap:
            self.now, _, timer = heapq.heappop(self._heap)
            if timer.call is not None:
                timer.call()
                return True
        return False


class _Done:
    """A future without a value."""

    def __init__(self) -> None:
        self._calls: list[Callable[[Any], None]] = []

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self._calls.append(call)

    def set(self) -> None:
        for call in self._calls:
            call(self)

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        return None

    def result(self) -> None:
        return None


class Link:
    """The controller's end of a connection, and the way to the peer's."""

    def __init__(self, world: World, server: Server, peer: Any) -> None:
        self.world = world
        self.server = server
        self.to = peer
        self.closed = False
        self.context: Any = None
        self.principal: Any = None
        self.peer = self.remote = ""
        self.fault: Any = None
        self._in = self._out = 0.0

    # what the controller calls

    def reply(self, request: int, message: Any, payload: Sequence[Any] = ()) -> None:
        self._send(Kind.REPLY, request, (message, bytes(payload[0])) if payload else message)

    def fail(self, request: int, error: BaseException) -> None:
        self._send(Kind.REPLY, request, Failure.of(error))

    def send(self, message: Any) -> None:
        self._send(Kind.NOTICE, 0, message)

    def abort(self, reason: str) -> None:
        self.cut()

    def finish(self) -> None:
        self.cut()

    close = abort  # type: ignore[assignment]

    def trust(self, limits: Any) -> None:
        """Frames have no size here."""

    # what the peer calls

    def request(self, number: int, message: Any, floor: int = 0, payload: bytes | None = None) -> None:
        view = None if payload is None else memoryview(payload)
        self._arrive(lambda: self.server.controller.on_request(self, number, message, view, floor))

    def notify(self, message: Any) -> None:
        self._arrive(lambda: self.server.controller.on_notice(self, message))

    # the network

    def cut(self) -> None:
        """Both ends notice, each in its own time. What is under way is lost."""
        if not self.closed:
            self.closed = True
            if self.server.alive:
                self.world.clock.call_later(self.world.delay(), self._noticed)
            self.world.clock.call_later(self.world.delay(), self.to.cut_off, self)

    def _noticed(self) -> None:
        if self.server.alive:
            self.server.controller.on_lost(self)

    def _arrive(self, call: Callable[[], None]) -> None:
        self._in = max(self._in, self.world.clock.now + self.world.delay())
        self.world.clock.call_at(self._in, self._if_open, call)

    def _send(self, kind: int, request: int, message: Any) -> None:
        if not self.closed:
            self._out = max(self._out, self.world.clock.now + self.world.delay())
            self.world.clock.call_at(self._out, self._if_open, lambda: self.to.receive(self, kind, request, message))

    def _if_open(self, call: Callable[[], None]) -> None:
        if not self.closed and self.server.alive:
            call()


class Server:
    """One life of a controller, which is ``number`` of ``world.shards``."""

    def __init__(self, world: World, number: int = 0) -> None:
        self.alive = True
        self.failure: Exception | None = None
        config = ControllerConfig(
            durability="process", timing=Timing(heartbeat=1.0, peer_timeout=2.0, reconnect_grace=3.0),
            shards=[f"shard:{shard + 1}" for shard in range(world.shards)] if world.shards > 1 else [], shard=number,
        )  # fmt: skip
        core = ControlCore(journal=True, shard=number)
        self.controller = Controller(config, core, world.clock)  # type: ignore[arg-type]
        self.journal = Journal(world.folder / str(number), segment_bytes=4096)
        self._world = world
        self._sync = world.random.random() < 0.5
        attach_journal(
            self.controller,
            self.journal,
            world.clock,  # type: ignore[arg-type]
            self._on_disk,  # type: ignore[arg-type]
            self._failed,
            sync=self._sync,
            compact_bytes=6000,
        )
        self._synced = self._written()

    def _written(self) -> tuple[int, int]:
        return self.journal._number, self.journal._length

    def _on_disk(self, work: Callable[[], None], done: _Done) -> None:
        """The disk takes its time. What was written before it began is then safe from the end of the machine."""
        written = self._written()

        def finish() -> None:
            if self.alive:
                work()
                self._synced = max(self._synced, written)
                done.set()

        self._world.clock.call_later(self._world.delay(), finish)

    def _failed(self, error: Exception) -> None:
        self.failure = error

    def die(self) -> None:
        """Kill it: no timer of it may run again, and its descriptors are closed."""
        self.alive = False
        controller = self.controller
        controller._sweeper.cancel()
        if controller._deadline is not None:
            controller._deadline.cancel()
        if controller.journal is not None:
            controller.journal._broken = True
        number, length = self._written()
        self.journal.close()
        if self._sync:  # the end of the machine: any part of what the disk did not confirm may be missing
            kept = self._synced[1] if self._synced[0] == number else HEADER_BYTES
            os.truncate(self.journal.folder / f"segment-{number:016x}", self._world.random.randint(kept, length))


class World:
    """``events`` is what happened, for people who look at a failing seed."""

    def __init__(self, seed: int, shards: int = 1) -> None:
        self.shards = shards
        self.random = random.Random(seed)
        self.clock = Clock()
        self.events: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="tq-simulation-", dir="/dev/shm")
        self.folder = Path(self._folder.name)
        self.links: list[Link] = []
        self.servers = [Server(self, number) for number in range(shards)]
        self.delivered: Counter[int] = Counter()
        self.worked: set[int] = set()
        """Rows that a client of the leasing task was done with, so that it asked to acknowledge them."""
        self.finished: set[int] = set()
        """Rows whose acknowledgement by the leasing task was answered."""
        self.cleared: set[int] = set()
        self.locks: dict[int, str] = {}
        """Who was told that it holds the lock of a number."""
        self.abandoned = 0
        """Fetches whose answer nobody waits for any more: what they took is lost to the task."""

    @property
    def server(self) -> Server:
        """The only one, or the first."""
        return self.servers[0]

    def close(self) -> None:
        for server in self.servers:
            server.die()
        self._folder.cleanup()

    def delay(self) -> float:
        """Seconds on the network: mostly short, now and then very long."""
        return self.random.choice((0.001, 0.002, 0.01, 0.05, 1.0 * self.random.random()))

    def note(self, text: str) -> None:
        self.events.append(f"{self.clock.now:9.4f} {text}")

    def connect(self, peer: Any, hello: Hello, shard: int = 0) -> Link:
        link = Link(self, self.servers[shard], peer)
        self.links = [old for old in self.links if not old.closed]
        self.links.append(link)
        link.request(1, hello)
        return link

    def restart(self, shard: int = 0) -> None:
        """Kill a controller and start the next one at once."""
        self.note(f"controller {shard} is killed")
        self.servers[shard].die()
        for link in self.links:
            if link.server is self.servers[shard]:
                link.cut()
        self.servers[shard] = Server(self, shard)

    def cut_one(self) -> None:
        """Break some connection."""
        alive = [link for link in self.links if not link.closed]
        if alive:
            link = self.random.choice(alive)
            self.note(f"connection of {link.to.name} breaks")
            link.cut()
