"""A client of several controllers. Each request goes to the shard of its partition, or to all shards.

A partition that was moved is on another shard than its name says: the shard that is asked then says where to ask next,
and the client remembers that. Every shard has an `Engine` of its own, with its own connections and its own numbers of
storage units, so that one that is gone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from transfer_queue.client.engine import Engine
from transfer_queue.client.reading import LoadedBatch
from transfer_queue.client.session import MovedAwayError
from transfer_queue.client.twins import on_loop
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.config.attach import Target
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.commands import Batch, Command, Commit, Committed, Fetch, Lookup, Reply
from transfer_queue.control.directory import Shard, merge_values, shard_of, spans
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError
from transfer_queue.wire.moves import Settle

if TYPE_CHECKING:
    import torch

__all__ = ["QueueEngine", "ShardedEngine", "attach", "engines_of"]

T = TypeVar("T")
_ANY = Target()
_MOST_PLACES = 1 << 16
"""Moved partitions that a client remembers."""
_PAUSE_S = 0.02
_LEAST_WAIT_S = 0.001
_SETTLE_S = 10.0


class ShardedEngine:
    """An `Engine` for a queue of several controllers. ``engines``: one for each shard, in order."""

    def __init__(self, engines: Sequence[Engine], first: Engine) -> None:
        self.engines = list(engines)
        self._first = first
        self._places: dict[str, int] = {}
        """Partitions that are elsewhere than their names say, as the shards said."""

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()

    @property
    def ended(self) -> str:
        return next(filter(None, (engine.ended for engine in self.engines)), "")

    def give_up(self, reason: str) -> None:
        for engine in self.engines:
            engine.give_up(reason)

    @property
    def backend_kind(self) -> str:
        return self._first.backend_kind

    @property
    def backend_settings(self) -> dict[str, Any]:
        return self._first.backend_settings

    @property
    def controller_attributes(self) -> dict[str, Any]:
        """Attributes of the shard that this client attached to first."""
        return self._first.controller_attributes

    @property
    def know_servers(self) -> bool:
        return self._first.know_servers

    def beside(self, name: str, partition: str) -> str:
        shards = len(self.engines)
        names = (f"{name}.{number}" for number in itertools.count())
        return next(found for found in names if shard_of(found, shards) == shard_of(partition, shards))

    async def request(self, command: Command, timeout_s: float, reach_s: float | None = None) -> Reply:
        if not spans(command):
            return await self._there(
                command.partition, lambda engine, _: engine.request(command, timeout_s, reach_s), timeout_s
            )
        return merge_values(await asyncio.gather(*(engine.request(command, timeout_s) for engine in self.engines)))

    async def fetch(self, command: Fetch, timeout_s: float, *, strict: bool = False) -> Batch:
        until = monotonic() + command.timeout_s

        def fetch(engine: Engine, waited_s: float) -> Awaitable[Batch]:
            again = command
            if waited_s and command.timeout_s:
                again = msgspec.structs.replace(command, timeout_s=max(_LEAST_WAIT_S, until - monotonic()))
            return engine.fetch(again, timeout_s, strict=strict)

        return await self._there(command.partition, fetch, command.timeout_s + timeout_s)

    async def put(
        self, block: EncodedBlock | None, commit: Commit, *, timeout_s: float, device: torch.device | None = None
    ) -> Committed:
        async def put(engine: Engine, _: float) -> Committed:
            await engine.welcomed(timeout_s)  # it says where blocks are stored
            return await engine.put(block, commit, timeout_s=timeout_s, device=device)

        return await self._there(commit.partition, put, commit.wait_s + timeout_s)

    async def lookup(self, command: Lookup, timeout_s: float) -> Batch:
        return await self._there(command.partition, lambda engine, _: engine.lookup(command, timeout_s), timeout_s)

    async def load(self, batch: Batch, fields: Sequence[str], again: Lookup, timeout_s: float) -> LoadedBatch:
        return await self._there(
            again.partition, lambda engine, _: engine.load(batch, fields, again, timeout_s), timeout_s
        )

    async def find(self, command: Lookup, fields: Sequence[str], guess: Batch | None, timeout_s: float) -> LoadedBatch:
        return await self._there(
            command.partition, lambda engine, _: engine.find(command, fields, guess, timeout_s), timeout_s
        )

    def place(self, partition: str) -> int:
        """The shard that has a partition, as far as this client knows."""
        found = self._places.get(partition)
        if found is None:
            hosts = (number for number, engine in enumerate(self.engines) if partition in engine.guests)
            found = next(hosts, None)
        return shard_of(partition, len(self.engines)) if found is None else found

    async def _there(self, partition: str, work: Callable[[Engine, float], Awaitable[T]], timeout_s: float) -> T:
        """Do ``work`` with the engine of the partition's shard, and again where it has moved to meanwhile.

        ``work`` hears how many seconds have gone by. Raises ConnectionLostError if the partition is nowhere to be
        found for ``timeout_s`` seconds.
        """
        started = monotonic()
        for hop in itertools.count():
            try:
                return await work(self.engines[self.place(partition)], monotonic() - started if hop else 0.0)
            except MovedAwayError as error:
                await on_loop()
                waited_s = monotonic() - started
                if waited_s > timeout_s or not error.moved.shard < len(self.engines):
                    raise ConnectionLostError(
                        f"the controllers disagree on where partition {partition!r} is; tq move settles that"
                    ) from None
                await self._follow(partition, error.moved.shard, error.moved.proof, started + timeout_s)
                if hop > 1:  # it moves back and forth, or the shards do not know yet
                    await asyncio.sleep(_PAUSE_S * min(hop, 10))
        raise AssertionError("unreachable")

    async def _follow(self, partition: str, shard: int, proof: str, deadline: float) -> None:
        """The partition is on ``shard``, which serves it to a client that shows ``proof``."""
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        self._places[partition] = shard
        while proof:
            try:
                await self.engines[shard].ask(Settle(partition, proof), _SETTLE_S)
                return
            except (ConnectionLostError, WaitTimeoutError):  # it may be sent again
                if monotonic() > deadline:
                    raise


QueueEngine: TypeAlias = "Engine | ShardedEngine"
"""Engine of a client, for one controller or several."""


def engines_of(queue: QueueEngine) -> list[Engine]:
    """One for each controller."""
    return [queue] if isinstance(queue, Engine) else queue.engines


async def attach(
    addresses: list[str],
    client_id: str,
    run_copy: Callable[[Callable[[], Any]], Any],
    security: PeerSecurity | None,
    timeout_s: float,
    target: Target = _ANY,
) -> QueueEngine:
    """Attach to the queue that has a controller at one of ``addresses``, which names the others if there are any.

    The others may be unreachable: requests for their partitions wait for them. Raises ConfigError, also if the queue is
    not ``target``, and ConnectionLostError.
    """
    first = Engine(addresses, client_id, run_copy, security, target=target)
    await first.open(timeout_s)
    found = first.shard
    if found is None:
        return first
    engines = []
    for number, address in enumerate(found.addresses):
        if number == found.number:
            engines.append(first)
        else:
            engine = Engine([address], client_id, run_copy, security, Shard(number, found.addresses), target)
            engine.start()
            engines.append(engine)
    return ShardedEngine(engines, first)
