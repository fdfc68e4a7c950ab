"""Blocks between processes that have no queue in common: each serves those that it stored, and reads those of others.

A process that stores blocks runs a storage unit of the memory backend within itself, over memory without a name: what
it stored ends with it, however it ends, but for what readers still map.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import psutil

from transfer_queue.client.io import IoThread, close_in_forked_children
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.config.quantity import Quantity
from transfer_queue.config.security import PeerSecurity, ServerSecurity
from transfer_queue.errors import ConfigError, RequestError
from transfer_queue.runtime.block_server import BlockServer
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.memory import left_of_groups
from transfer_queue.runtime.secret import new_secret
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import BackendContext, BlockRead, Fetched, StoreContext, UnitInfo
from transfer_queue.storage.memory.arena import ArenaFile
from transfer_queue.storage.memory.client import MemoryBackend
from transfer_queue.storage.memory.unit import MemoryStore
from transfer_queue.wire.messages import Envelope, Hello, UnitReply

__all__ = ["CAPACITY_VARIABLE", "Exchange", "Place"]

CAPACITY_VARIABLE = "TQ_RAY_CAPACITY"
"""Most bytes that a process holds for others."""
_SHARE = 0.3
"""Of the memory of the machine, or of what the limit of the container leaves if that is less, without the variable.
Only memory that was once used counts against them."""
_LEAST = 1 << 20
_DECODER = msgspec.msgpack.Decoder(Envelope[UnitReply])
_HEARTBEAT_S, _TIMEOUT_S = 2.0, 60.0
_CONNECT_S = 10.0
_CALL_S = 600.0


class Place(NamedTuple):
    """Where a block is: the process that holds it and what proves that a reader may have it."""

    address: str
    secret: str
    block: int
    nbytes: int


@dataclass
class _Peer:
    """A process that holds blocks."""

    unit: UnitInfo
    secret: str
    uses: int = 0
    """Reads under way. It is forgotten when there are none and its connection has ended."""
    connection: Connection | None = None


class Exchange:
    """The blocks of this process, and its connections to others. Methods may be called from any thread.

    ``host``: the address that other processes reach this one by.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._io = IoThread()  # its own: a put may come from the copy thread of a client of a queue
        self._keepalive = Keepalive(_HEARTBEAT_S, _TIMEOUT_S)
        self._name = f"process {os.getpid()}"
        self._peers: dict[str, _Peer] = {}
        self._units = itertools.count()
        self._writer = 1 + secrets.randbelow((1 << 30) - 1)
        self._blocks = itertools.count((self._writer << 32) + 1)
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._store: MemoryStore | None = None
        self._server: BlockServer | None = None
        self._backend = MemoryBackend(
            BackendContext(self._name, self._writer, "", {}, self._connect, self._io.run_copy)
        )
        close_in_forked_children(self)

    # ---------------------------------------------------------------------------------------------------------- calls

    @property
    def alive(self) -> bool:
        """False in a child of the process that made it."""
        return self._io.alive

    def put(self, block: EncodedBlock) -> Place:
        """Store a block here. Raises CapacityError, ConfigError, StartError."""
        return self._io.wait(self._put(block), _CALL_S)

    def get(self, place: Place) -> Fetched:
        """Read a block, of this process or another.

        Raises ConnectionLostError if its process is gone or cannot be reached, StorageKeyNotFoundError if it was
        freed.
        """
        return self._io.wait(self._get(place), _CALL_S)

    def free(self, block: int) -> None:
        """Drop a block of this process; returns at once. Its memory is used again when no reader uses it."""
        self._io.loop.call_soon_threadsafe(self._free, block)

    def usage(self) -> tuple[int, int]:
        """(bytes, blocks) that this process holds."""
        store = self._store
        if store is None:
            return 0, 0
        stats = store.stats()
        return stats.used, stats.blocks

    # -------------------------------------------------------------------------------------------------- on the I/O loop

    async def _put(self, block: EncodedBlock) -> Place:
        server = await self._serving()
        number = next(self._blocks)
        own = self._peers[server.address]
        await self._backend.put(block, number, own.unit, wait_s=0.0)
        return Place(server.address, own.secret, number, block.nbytes)

    async def _get(self, place: Place) -> Fetched:
        peer = self._peer(place.address, place.secret)
        read = BlockRead(peer.unit, place.block, nbytes=place.nbytes)
        peer.uses += 1
        try:
            return await self._backend.get([read], timeout_s=_TIMEOUT_S + place.nbytes / 10e6)
        finally:
            peer.uses -= 1
            self._forget_unused(place.address)

    def _free(self, block: int) -> None:
        if self._store is not None:
            self._io.loop.create_task(self._store.free([block]))

    def _peer(self, address: str, secret: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            unit = UnitInfo(next(self._units), f"at {address}", address, 0)
            peer = self._peers[address] = _Peer(unit, secret)
        peer.secret = secret  # a process that has ended may have had the same address
        return peer

    def _forget_unused(self, address: str) -> None:
        peer = self._peers.get(address)
        if peer is not None and not peer.uses and peer.connection is None:
            del self._peers[address]

    async def _serving(self) -> BlockServer:
        """The storage unit within this process, started at the first put."""
        if self._server is None:
            secret = new_secret()
            context = StoreContext(self._name, _capacity(), {}, "/dev/shm")
            store = MemoryStore(context, ArenaFile(context.capacity, unnamed=True))
            server = BlockServer(store, self._keepalive, lambda blocks: None)
            try:
                await server.listen(self._host, 0, self._host, ServerSecurity(secret=secret))
            except BaseException:
                await store.close()
                raise
            self._peer(server.address, secret).uses += 1  # for good
            self._store, self._server = store, server
        return self._server

    async def _connect(self, address: str) -> Connection:
        peer = self._peers[address]
        connection = await connect(
            address,
            Hello("client", self._name, writer=self._writer),
            self,
            _DECODER,
            self._keepalive,
            what="process",
            timeout_s=_CONNECT_S,
            credentials=Credentials(PeerSecurity(secret=peer.secret)),
        )
        self._connections.add(connection)
        peer.connection = None if connection.closed else connection
        return connection

    # -------------------------------------------------------------------------------------------- Endpoint, ForkHandler

    def on_request(
        self, connection: Connection, request: int, body: Any, payload: memoryview | None, floor: int
    ) -> None:
        connection.abort("a reader serves no requests")

    def on_notice(self, connection: Connection, body: Any) -> None: ...

    def receive_buffer(self, connection: Connection, body: Any, nbytes: int) -> memoryview | None:
        raise RequestError("a reader takes no payload but in replies")

    def on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._backend.release_lost()
        for address, peer in list(self._peers.items()):
            if peer.connection is connection:
                peer.connection = None
                self._forget_unused(address)

    def descriptors(self) -> list[int]:
        served = [] if self._server is None else self._server.descriptors()
        return [*served, *(number for each in self._connections if (number := each.fileno()) >= 0)]

    def abandon_in_child(self) -> None:
        self._backend.abandon_in_child()
        if self._store is not None:
            self._store.abandon_in_child()


def _capacity() -> int:
    text = os.environ.get(CAPACITY_VARIABLE)
    if not text:
        return max(_LEAST, int(min([psutil.virtual_memory().total, *left_of_groups()]) * _SHARE))
    try:
        return int(Quantity(text))
    except ValueError as error:
        raise ConfigError(f"environment variable {CAPACITY_VARIABLE}: {error}") from None
