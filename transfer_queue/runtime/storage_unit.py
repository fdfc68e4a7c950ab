"""A storage unit process: a backend's UnitStore behind sockets.

``python -m transfer_queue.runtime.storage_unit --config FILE`` with a StorageUnitConfig.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import sys
from collections.abc import Callable
from typing import Any, cast

import msgspec

from transfer_queue._printable import log_to_stderr
from transfer_queue.config.processes import StorageUnitConfig
from transfer_queue.control.directory import Shard, shard_of_block
from transfer_queue.errors import ConfigError, ConnectionLostError, RequestError, TransferQueueError
from transfer_queue.runtime.access import GuardedStore, Tickets
from transfer_queue.runtime.block_server import BlockServer
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.http import StatusServer
from transfer_queue.runtime.memory import arena_bytes
from transfer_queue.runtime.metrics import unit_metrics
from transfer_queue.runtime.process import announce_ready, run_process
from transfer_queue.runtime.tls import Credentials
from transfer_queue.runtime.units import pack_blocks, unpack_blocks
from transfer_queue.storage.base import ServingStore, StoreContext, UnitStore
from transfer_queue.storage.registry import open_store
from transfer_queue.wire.messages import (
    ControllerReply,
    Envelope,
    FreeBlocks,
    Hello,
    Holding,
    Join,
    ReportOrphans,
    UnitReport,
)

__all__ = ["ControllerLink", "ControllerLinks", "main"]

log = logging.getLogger(__name__)

_CONTROLLER = msgspec.msgpack.Decoder(Envelope[ControllerReply])
_JOIN_TIMEOUT_S = 30.0
_RETRY_S = (0.1, 0.5)
_LISTED = 1 << 20
"""Blocks in one message, so that it stays within what a controller takes."""


class ControllerLink:
    """The connection that a storage unit keeps to a controller: it registers, reports and is told what to free.

    ``addresses``: of the controller. ``shard``: which of ``config.shards`` it is; None: there is no other. ``alone``:
    whether the unit is of no use without it.
    """

    def __init__(
        self,
        config: StorageUnitConfig,
        store: UnitStore,
        keepalive: Keepalive,
        addresses: list[str],
        shard: int | None,
        alone: Callable[[], bool],
    ) -> None:
        self.address = ""
        """Where clients reach this unit; set before ``run``."""
        self.connected = False
        self._joined_before = False
        self._doubts = 0
        self._addresses = addresses
        self._shard = shard
        self._alone = alone
        self._config = config
        self._store = store
        self._keepalive = keepalive
        self._credentials = Credentials(config.security)
        self._incarnation = store.incarnation or secrets.token_hex(8)
        self._connection: Connection | None = None
        self._lost = asyncio.Event()
        self._unreported: list[int] = []
        """Orphans since the latest inventory."""
        self._tasks: set[asyncio.Task[None]] = set()

    def report_orphans(self, blocks: list[int]) -> None:
        """Not connected: the inventory of the next registration tells the controller, or the list behind it does."""
        own = self._own(blocks)
        if self._connection is None:
            self._unreported += own
        elif own:
            self._connection.send(ReportOrphans(pack_blocks(own)))

    def _own(self, blocks: list[int]) -> list[int]:
        """Those of ``blocks`` that this controller knows of."""
        if self._shard is None:
            return blocks
        return [block for block in blocks if shard_of_block(block, len(self._config.shards)) == self._shard]

    def _check_shard(self, connection: Connection) -> None:
        """Raises ConnectionLostError for a controller of another number of shards: whose a block is depends on it, and
        a controller has those freed that it does not know."""
        found = Shard.of(connection.welcome.attributes)
        said = None if found is None else (found.number, len(found.addresses))
        wanted = None if self._shard is None else (self._shard, len(self._config.shards))
        if said != wanted:
            told, own = ("one controller" if who is None else "shard {} of {}".format(*who) for who in (said, wanted))
            raise ConnectionLostError(
                f"{connection.peer} is {told}, and this unit was started to serve {own}; start it with the settings of "
                "the queue as it is now"
            )

    def descriptors(self) -> list[int]:
        """Sockets that a forked child must close."""
        number = -1 if self._connection is None else self._connection.fileno()
        return [number] if number >= 0 else []

    def start_over(self) -> None:
        """Register as another unit: what this one held is lost."""
        self._incarnation = self._store.incarnation or secrets.token_hex(8)
        self.tell_again()

    def tell_again(self) -> None:
        """Register again: what this one holds may not be what it held."""
        self._doubts += 1
        if self._connection is not None:
            self._connection.close()

    async def run(self, registered: asyncio.Event) -> None:
        """Stay registered for ever. Raises ConnectionLostError if the first registration fails for too long, unless
        there are other controllers to serve: then it goes on trying."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._config.start_timeout
        delay = _RETRY_S[0]
        while True:
            try:
                await self._register()
            except TransferQueueError as error:
                if not registered.is_set() and (
                    loop.time() >= give_up or not isinstance(error, ConnectionLostError | TimeoutError)
                ):
                    if self._alone() or not isinstance(error, ConnectionLostError | TimeoutError):
                        raise
                    log.warning("serving without one controller for now: %s", error)
                    registered.set()
                log.info("not registered: %s", error)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # spread the reconnects of many units
                delay = min(delay * 2, _RETRY_S[1])
            else:
                registered.set()
                delay = _RETRY_S[0]
                await self._report_until_lost()

    async def _register(self) -> None:
        config, doubts = self._config, self._doubts
        self._lost.clear()
        connection = await self._connect()
        try:
            self._check_shard(connection)
            stats = self._store.stats()
            self._unreported.clear()
            held = self._own(await self._store.inventory())
            ahead = len(held) // _LISTED * _LISTED
            _list_blocks(connection, held[:ahead])
            join = Join(
                config.name,
                self._incarnation,
                self.address,
                stats.capacity,
                stats.used,
                pack_blocks(held[ahead:]),
                self._store.attributes(),
                len(held),
            )
            joined, _ = await connection.request(join, timeout_s=_JOIN_TIMEOUT_S)
            if doubts != self._doubts:
                raise ConnectionLostError("what this unit held was lost while it registered")
            self._connection = connection
            self.connected = True
            if isinstance(self._store, GuardedStore):
                self._store.tickets[self._shard or 0] = Tickets(joined.ticket_key)
            shard = () if self._shard is None else (self._shard,)  # stores of one controller need not take it
            self._store.registered(joined.unit, joined.run, *shard)
            await self._store.free(unpack_blocks(joined.unknown))
            if self._joined_before or held:  # writers went on meanwhile
                listed, now = set(held), self._own(await self._store.inventory())
                _list_blocks(connection, [block for block in now if block not in listed])
            orphans, self._unreported = self._unreported, []
            self.report_orphans(orphans)
        except (TransferQueueError, asyncio.CancelledError):
            connection.close()
            raise
        self._joined_before = True

    async def _connect(self) -> Connection:
        hello = Hello("unit", self._config.name)
        failure: TransferQueueError | None = None
        for address in self._addresses:
            try:
                return await connect(
                    address,
                    hello,
                    self,
                    _CONTROLLER,
                    self._keepalive,
                    what="controller",
                    timeout_s=10.0,
                    credentials=self._credentials,
                )
            except (ConnectionLostError, TimeoutError) as error:
                failure = cast("TransferQueueError", error)
        assert failure is not None
        raise failure

    async def _report_until_lost(self) -> None:
        while self._connection is not None and not self._connection.closed:
            self._connection.send(UnitReport(self._store.stats()))
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._config.timing.heartbeat)

    # ------------------------------------------------------------------------------------------------------- Endpoint

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        connection.fail(request, RequestError("a storage unit serves no requests of the controller"))

    def on_notice(self, connection: Connection, body: Any) -> None:
        if isinstance(body, FreeBlocks):
            task = asyncio.get_running_loop().create_task(self._free(connection, unpack_blocks(body.blocks)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _free(self, connection: Connection, blocks: list[int]) -> None:
        try:
            await self._store.free(blocks)
        except TransferQueueError as error:
            log.warning("%d blocks were not freed: %s; registering again, to be told once more", len(blocks), error)
            connection.close()

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        raise RequestError("a storage unit takes no payload from the controller")

    def on_lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self.connected = False
            self._lost.set()


def _list_blocks(connection: Connection, blocks: list[int]) -> None:
    for start in range(0, len(blocks), _LISTED):
        connection.send(Holding(pack_blocks(blocks[start : start + _LISTED])))


class ControllerLinks:
    """The links to all controllers of the queue."""

    def __init__(self, config: StorageUnitConfig, store: UnitStore, keepalive: Keepalive) -> None:
        self._links = [
            ControllerLink(config, store, keepalive, [address], shard, lambda: not self.connected)
            for shard, address in enumerate(config.shards)
        ]
        if not config.shards:
            self._links = [ControllerLink(config, store, keepalive, config.controller, None, lambda: True)]

    @property
    def connected(self) -> bool:
        """Return whether any controller is connected."""
        return any(link.connected for link in self._links)

    def connected_to(self, shard: int) -> bool:
        return self._links[shard].connected

    def missing(self) -> str:
        """Return what readiness waits for; empty when ready."""
        if self.connected:
            return ""
        return "not registered with " + ("the controller" if len(self._links) == 1 else "any controller")

    def report_orphans(self, blocks: list[int]) -> None:
        for link in self._links:
            link.report_orphans(blocks)

    def start_over(self) -> None:
        for link in self._links:
            link.start_over()

    def tell_again(self) -> None:
        for link in self._links:
            link.tell_again()

    async def run(self, address: str, registered: asyncio.Event) -> None:
        """Stay registered with all controllers, see `ControllerLink.run`; clients reach this unit at ``address``."""

        async def all_registered(first: list[asyncio.Event]) -> None:
            for event in first:
                await event.wait()
            registered.set()

        first = [asyncio.Event() for _ in self._links]
        for link in self._links:
            link.address = address
        await asyncio.gather(
            all_registered(first), *(link.run(event) for link, event in zip(self._links, first, strict=True))
        )


async def serve(config: StorageUnitConfig, stop: asyncio.Event) -> None:
    """Run a storage unit until ``stop`` is set."""
    capacity = arena_bytes(config)
    arena: dict[str, Any] = {"prefault": config.prefault, "reserve": config.reserve}
    if capacity > config.capacity:
        arena["prefault"] = config.capacity if config.prefault else False
        log.warning(
            "%s has no limit of its own and may use %d MiB, %g of the free memory; unit_capacity sets a limit",
            config.name,
            capacity >> 20,
            config.memory_share,
        )
    context = StoreContext(
        config.name,
        capacity,
        {**arena, **config.backend.settings} if config.backend.kind == "simple" else config.backend.settings,
        config.directory,
        config.durability,
        log.warning,
        lost=lambda: links.start_over(),
        shards=max(1, len(config.shards)),
        in_doubt=lambda: links.tell_again(),
    )
    keepalive = Keepalive(config.timing.heartbeat, config.timing.peer_timeout)
    store = await open_store(config.backend.kind, context)
    if config.security.policy_file is not None and isinstance(store, ServingStore):
        store = GuardedStore(store, lambda shard: links.connected_to(shard), max(1, len(config.shards)))
    try:
        links = ControllerLinks(config, store, keepalive)
    except ConfigError:
        await store.close()
        raise
    server = BlockServer(store, keepalive, links.report_orphans) if isinstance(store, ServingStore) else None
    status = StatusServer(
        unit_metrics(config.name, store.stats, lambda: links.connected, server),
        links.missing,
    )
    registered = asyncio.Event()
    running: asyncio.Task[None] | None = None
    address = ""
    try:
        if server is not None:
            await server.listen(config.host, config.port, config.advertise_host, config.security)
            address = server.address
        if config.metrics_port is not None:
            await status.listen(config.host, config.metrics_port, config.advertise_host)
        running = asyncio.create_task(links.run(address, registered))
        await _first(running, registered, stop)
        if registered.is_set():
            announce_ready(name=config.name, address=address or None, metrics=status.address or None)
        await _first(running, stop)
    finally:
        if running is not None:
            running.cancel()
        status.close()
        if server is not None:
            await server.close()
        await store.close()


async def _first(running: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Wait for any of the events, or raise what ended ``running``."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([running, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if running.done():
        running.result()


def main() -> int:
    log_to_stderr()
    return run_process(
        StorageUnitConfig, lambda config, stop, _: serve(config, stop), "transfer_queue.runtime.storage_unit"
    )


if __name__ == "__main__":
    sys.exit(main())
