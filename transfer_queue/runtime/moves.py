"""The controller's part in moving a partition: see `transfer_queue.control.moves`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from transfer_queue.control import moves
from transfer_queue.control.commands import Command, Done, Fetch, Moved, RenewLock, Value
from transfer_queue.control.core import ControlCore
from transfer_queue.control.directory import block_ids, shard_of, spans
from transfer_queue.errors import RequestError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.sessions import ClientSession, ClientSessions
from transfer_queue.runtime.units import UnitRegistry
from transfer_queue.wire.messages import ENCODER
from transfer_queue.wire.moves import (
    Export,
    Exported,
    Leave,
    ListMoves,
    MoveRequest,
    Receive,
    Settle,
    StopExport,
)

__all__ = ["HOLD_S", "PartitionMoves"]

HOLD_S = 4.0
"""Longest time for which changes of a partition are put off. After it the partition stays."""


@dataclass(eq=False)
class _Export:
    """A partition that a mover copies. ``proof``: empty without a hold."""

    mover: Connection
    proof: str = ""
    limit: asyncio.TimerHandle | None = None
    put_off: dict[tuple[Connection, int], Callable[[], None]] = field(default_factory=dict)


class PartitionMoves:
    """An export and its hold belong to the connection that asked for them and end with it.

    ``shard`` of ``shards``: this controller. ``after``: see ``UnitRegistry``. ``repeat`` serves a request that waited.
    """

    def __init__(
        self,
        core: ControlCore,
        units: UnitRegistry,
        clients: ClientSessions,
        after: Callable[..., None],
        loop: asyncio.AbstractEventLoop,
        shard: int,
        shards: int,
        repeat: Callable[[Connection, int, Command, memoryview | None, int], None],
    ) -> None:
        self._core = core
        self._units = units
        self._clients = clients
        self._after = after
        self._loop = loop
        self._shard, self._shards = shard, shards
        self._repeat = repeat
        self._exports: dict[str, _Export] = {}
        self.checkpointing: Callable[[], bool] = lambda: False
        """Whether the state of all controllers is being captured."""

    # -------------------------------------------------------------------------------------------- requests of clients

    def elsewhere(self, body: Any) -> Moved | None:
        """Where the partition of a command is, if it is not here."""
        if self._shards < 2 or not isinstance(body, Command) or spans(body):
            return None
        here = self._core.state.moves
        if body.partition in here.here:
            return None
        if away := here.away.get(body.partition):
            return Moved(away.shard, away.proof)
        home = shard_of(body.partition, self._shards)
        return None if home == self._shard else Moved(home)

    def holds(self, body: Any) -> bool:
        """Whether the request is to be put off."""
        if not self._exports or not isinstance(body, Command) or not body.mutates or isinstance(body, RenewLock):
            return False
        export = self._exports.get(body.partition)
        return export is not None and bool(export.proof)

    def put_off(self, connection: Connection, request: int, partition: str, serve: Callable[[], None]) -> None:
        """Call ``serve`` when the hold ends, unless the request is cancelled or its connection ends before."""
        self._exports[partition].put_off[connection, request] = serve

    def cancel(self, connection: Connection, request: int) -> None:
        for export in self._exports.values():
            export.put_off.pop((connection, request), None)

    def gone(self, connection: Connection) -> None:
        """End the exports of a connection."""
        for name in [name for name, export in self._exports.items() if export.mover is connection]:
            self._end(name)

    # --------------------------------------------------------------------------------------------- requests of movers

    def serve(self, connection: Connection, request: int, body: MoveRequest, payload: memoryview | None) -> None:
        """Raises RequestError, WaitTimeoutError and CapacityError."""
        if isinstance(body, Export | Receive):
            self._check_journal(body.partition)
        if isinstance(body, Export):
            self._export(connection, request, body)
            return
        if isinstance(body, ListMoves):
            reply: Any = Value(self._listed())
        elif isinstance(body, StopExport):
            export = self._exports.get(body.partition)
            if export is not None and export.mover is connection:
                self._end(body.partition)
            reply = Done()
        elif isinstance(body, Leave):
            reply = Value(self._leave(connection, body))
        elif isinstance(body, Receive):
            self._receive(connection.context, body, payload)
            reply = Done()
        elif isinstance(body, Settle):
            self._settle(body)
            reply = Done()
        else:
            reply = Value(moves.dismiss(self._core, body.partition, body.seal))
        self._after(connection.reply, request, reply)

    def _listed(self) -> dict[str, Any]:
        found = self._core.state.moves
        return {
            "away": {name: [away.shard, away.proof] for name, away in found.away.items()},
            "here": list(found.here),
            "arriving": {name: [arrival.source, arrival.seal] for name, arrival in found.arriving.items()},
            "leaving": {name: moves.seal_of(item.proof) if item.proof else "" for name, item in self._exports.items()},
        }

    def _export(self, connection: Connection, request: int, body: Export) -> None:
        name, running = body.partition, self._exports.get(body.partition)
        if running is not None and running.mover.context is not connection.context:
            raise RequestError(f"partition {name!r} is being moved already")
        if self.elsewhere(Command(name)) is not None:
            raise RequestError(f"partition {name!r} is not on controller shard {self._shard}")
        self._end(name)  # before the state is made, which delayed requests change
        content = moves.export(self._core, name)
        export = self._exports[name] = _Export(connection)
        seal = ""
        if body.hold:
            export.proof = secrets.token_hex(16)
            export.limit = self._loop.call_later(HOLD_S, self._end, name)
            seal = moves.seal_of(export.proof)
            self._suspend(name)
        self._units.pins.hold(("export", name), np.sort(block_ids(content)))
        leased = {lease[2] for partition in content["partitions"] for lease in partition["leases"]}
        sessions = [session for session in map(self._clients.get, leased) if session is not None]
        clients = {str(session.writer): session.client_id for session in sessions}
        exported = ENCODER.encode({"state": content, "seal": seal, "clients": clients})
        self._after(connection.reply, request, Exported(), [exported])

    def _suspend(self, name: str) -> None:
        """Put off the requests that are parked for the partition: they would change it."""
        now = self._loop.time()
        for waiter in moves.take_waiters(self._core, name):
            session = self._clients.get(waiter.client)
            if session is None or session.connection is None or session.parked.pop(waiter.request, None) is None:
                continue
            left_s = max(0.001, waiter.deadline - now)
            command = waiter.command
            if isinstance(command, Fetch):
                command = msgspec.structs.replace(command, timeout_s=left_s)
            else:
                command = msgspec.structs.replace(command, wait_s=left_s)
            later = partial(self._repeat, session.connection, waiter.request, command, None, 0)
            self._exports[name].put_off[session.connection, waiter.request] = later

    def _end(self, name: str) -> None:
        """End the hold, because the partition stays or has left, and serve the requests that were put off."""
        export = self._exports.pop(name, None)
        if export is None:
            return
        if export.limit is not None:
            export.limit.cancel()
        for unit, blocks in self._units.pins.release(("export", name)).items():
            self._after(self._units.free, unit, blocks)
        for (connection, _), serve in export.put_off.items():
            # A client that has come back repeats its requests over its new connection.
            if not connection.closed and connection.context.speaks_over(connection):
                serve()

    def _leave(self, connection: Connection, body: Leave) -> str:
        export = self._exports.get(body.partition)
        held = export is not None and export.proof and moves.seal_of(export.proof) == body.seal
        if export is None or export.mover is not connection or not held:
            raise WaitTimeoutError(
                f"partition {body.partition!r} was not copied within the {HOLD_S:g} s for which its changes are put off"
            )
        self._check_checkpoint()
        if not 0 <= body.shard < self._shards or body.shard == self._shard:
            raise RequestError(f"there is no other controller shard {body.shard}")
        moves.leave(self._core, body.partition, body.shard, export.proof)
        self._end(body.partition)
        return export.proof

    def _check_journal(self, name: str) -> None:
        """A controller that restarts must know where the partition is: else two controllers would serve its name."""
        if not self._core.state.log.journaling:
            raise RequestError(
                f"partition {name!r} cannot be moved: the controllers of this queue keep no journal, and one that "
                "restarts would not know where the partition is; set controller.durability to process or node"
            )

    def _check_checkpoint(self) -> None:
        """The captures of all controllers are one cut, in which each partition is once."""
        if self.checkpointing():
            raise WaitTimeoutError("a checkpoint of this queue is being saved; move the partition later")

    def _receive(self, session: ClientSession, body: Receive, payload: memoryview | None) -> None:
        self._check_checkpoint()
        name = body.partition
        if name not in self._core.state.moves.away and shard_of(name, self._shards) == self._shard:
            raise RequestError(f"partition {name!r} is on controller shard {self._shard} already")
        try:
            content: dict[str, Any] = msgspec.msgpack.decode(payload or b"", type=dict)
            numbers = block_ids(content)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the state is damaged: {type(error).__name__}: {error}") from error
        for number in numbers.tolist():
            if number >> 32 != session.writer:
                raise RequestError(f"block {number:#x} was not written by this client session")
            if number in session.fenced:
                raise StorageKeyNotFoundError(
                    f"block {number:#x} was freed before it arrived; move the partition again"
                )
        moves.receive(self._core, name, body.seal, body.source, content)
        for number in numbers.tolist():
            session.announced.pop(number, None)

    def _settle(self, body: Settle) -> None:
        arrival = self._core.state.moves.arriving.get(body.partition)
        clients: dict[int, int] = {}
        if arrival is not None:
            here = {session.client_id: session.writer for session in self._clients}
            named = {int(number): name for number, name in arrival.content.get("clients", {}).items()}
            clients = {number: here[name] for number, name in named.items() if name in here}
        moves.settle(self._core, body.partition, body.proof, clients)

    def forget(self) -> None:
        """End all moves: the whole state was replaced."""
        for name in list(self._exports):
            self._end(name)
