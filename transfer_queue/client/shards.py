"""A client of several controllers. Each request goes to the shard of its partition, or to all shards.

Every shard has an `Engine` of its own, with its own connections and its own numbers of storage units, so that one that
is gone costs the others nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from transfer_queue.client.engine import Engine
from transfer_queue.client.reading import LoadedBatch
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.config.attach import Target
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.commands import Batch, Command, Commit, Committed, Fetch, Lookup, Reply
from transfer_queue.control.directory import Shard, merge_values, shard_of, spans

if TYPE_CHECKING:
    import torch

__all__ = ["QueueEngine", "ShardedEngine", "attach", "engines_of"]

_ANY = Target()


class ShardedEngine:
    """An `Engine` for a queue of several controllers. ``engines``: one for each shard, in order."""

    def __init__(self, engines: Sequence[Engine], first: Engine) -> None:
        self.engines = list(engines)
        self._first = first

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
            return await self._of(command).request(command, timeout_s, reach_s)
        return merge_values(await asyncio.gather(*(engine.request(command, timeout_s) for engine in self.engines)))

    async def fetch(self, command: Fetch, timeout_s: float, *, strict: bool = False) -> Batch:
        return await self._of(command).fetch(command, timeout_s, strict=strict)

    async def put(
        self, block: EncodedBlock | None, commit: Commit, *, timeout_s: float, device: torch.device | None = None
    ) -> Committed:
        engine = self._of(commit)
        await engine.welcomed(timeout_s)  # it says where blocks are stored
        return await engine.put(block, commit, timeout_s=timeout_s, device=device)

    async def lookup(self, command: Lookup, timeout_s: float) -> Batch:
        return await self._of(command).lookup(command, timeout_s)

    async def load(self, batch: Batch, fields: Sequence[str], again: Lookup, timeout_s: float) -> LoadedBatch:
        return await self._of(again).load(batch, fields, again, timeout_s)

    async def find(self, command: Lookup, fields: Sequence[str], guess: Batch | None, timeout_s: float) -> LoadedBatch:
        return await self._of(command).find(command, fields, guess, timeout_s)

    def _of(self, command: Command) -> Engine:
        return self.engines[shard_of(command.partition, len(self.engines))]


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
