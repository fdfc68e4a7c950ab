"""Moving a partition from one controller to another while programs use it.

The mover copies the blocks under names of the target, as a drain copies them to other storage units: the name of a
block says whose it is. Most are copied while the partition is in use; what is left, and the state of the rows, while
its changes are put off. `transfer_queue.control.moves` says why nothing is lost or doubled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from transfer_queue.client.engine import Engine
from transfer_queue.client.shards import ShardedEngine, attach
from transfer_queue.client.windows import windows
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.blocks import COLUMNS
from transfer_queue.control.commands import BlockRef
from transfer_queue.control.directory import shard_of
from transfer_queue.control.moves import seal_of
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    DataLostError,
    RequestError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.storage.base import UnitInfo
from transfer_queue.wire.moves import Dismiss, Export, Leave, ListMoves, Receive, Settle, StopExport

__all__ = ["MovedPartition", "move_partition", "settle_moves"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_CONNECT_S = 20.0
_REQUEST_S = 30.0
_PAUSE_S = 0.2
_WINDOW_BLOCKS, _WINDOW_BYTES = 64, 64 << 20
_FEW_BYTES = 4 << 20
"""Bytes that are left to be copied while changes are put off."""
_MOST_PASSES = 8


_PASSING = (DataLostError, StorageKeyNotFoundError, ConnectionLostError, CapacityError, WaitTimeoutError)
"""A unit or a controller is away, there is no room, keys are locked, or the copy took too long: it may pass."""


class MovedPartition(NamedTuple):
    """``source``: shard that had it. ``held_s``: seconds for which changes were put off."""

    source: int
    rows: int
    blocks: int
    nbytes: int
    held_s: float


async def move_partition(
    addresses: list[str],
    partition: str,
    shard: int,
    *,
    security: PeerSecurity | None = None,
    timeout_s: float = 60.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> MovedPartition:
    """Move a partition to controller ``shard``; programs follow it by themselves.

    The controllers must keep a journal (``controller.durability``), and the storage units need room for a second copy
    of the partition meanwhile. ``security``: of an admin of the whole queue.
    ``progress`` hears of bytes that were copied. Raises RequestError if it cannot be moved, CapacityError,
    WaitTimeoutError after ``timeout_s`` seconds, ConnectionLostError, NotAuthorizedError. After an error the partition
    is on one of the two controllers, and whole.
    """
    attached = await attach(addresses, "move", _copy, security, _CONNECT_S)
    try:
        if not isinstance(attached, ShardedEngine) or not 0 <= shard < len(attached.engines):
            count = len(attached.engines) if isinstance(attached, ShardedEngine) else 1
            raise RequestError(f"there is no controller shard {shard}: the queue has {count}, counted from 0")
        engines = attached.engines
        await settle_moves(engines)
        lists = [(await engine.ask(ListMoves(), _REQUEST_S)).value for engine in engines]
        hosts = [number for number, found in enumerate(lists) if partition in found["here"]]
        source = hosts[0] if hosts else shard_of(partition, len(engines))
        if source == shard:
            return MovedPartition(source, 0, 0, 0, 0.0)
        return await _Mover(engines, partition, source, shard, timeout_s, progress).run()
    finally:
        await attached.close()


async def settle_moves(engines: Sequence[Engine]) -> None:
    """Complete or undo the moves whose mover is gone. Controllers that do not answer are left out."""
    for number, engine in enumerate(engines):
        try:
            arriving = (await engine.ask(ListMoves(), _REQUEST_S)).value["arriving"]
        except (ConnectionLostError, WaitTimeoutError) as error:
            log.warning("controller shard %d was not asked for unfinished moves: %s", number, error)
            continue
        for name, (source, seal) in arriving.items():
            await _settle(engines, name, source, number, seal)


async def _settle(engines: Sequence[Engine], name: str, source: int, target: int, seal: str) -> bool:
    """Complete or undo a move that ``target`` has received under ``seal``. Returns whether it is complete."""
    try:  # only now: what the source said before the target received the partition proves nothing
        found = (await engines[source].ask(ListMoves(), _REQUEST_S)).value
        shard, proof = found["away"].get(name, (-1, ""))
        if shard == target and seal_of(proof) == seal:
            await engines[target].ask(Settle(name, proof), _REQUEST_S)
            return True
        if found["leaving"].get(name) != seal:  # else its mover is at work
            await engines[target].ask(Dismiss(name, seal), _REQUEST_S)
    except (ConnectionLostError, WaitTimeoutError) as error:
        log.warning("the move of partition %r waits for its controllers: %s", name, error)
    return False


async def _copy(work: Callable[[], T]) -> T:
    return work()  # this loop has nothing else to do


class _Mover:
    def __init__(
        self,
        engines: Sequence[Engine],
        partition: str,
        source: int,
        target: int,
        timeout_s: float,
        progress: Callable[[int], None],
    ) -> None:
        self._engines = engines
        self._name = partition
        self._source, self._target = source, target
        self._from, self._to = engines[source], engines[target]
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._progress = progress
        self._copies: dict[tuple[int, int], tuple[BlockRef, UnitInfo]] = {}
        """(unit, block) of the source -> its copy."""
        self._sealed = ""
        """What the target has perhaps received."""

    async def run(self) -> MovedPartition:
        try:
            while True:
                try:
                    return await self._move()
                except _PASSING as error:
                    if self._sealed and await _settle(
                        self._engines, self._name, self._source, self._target, self._sealed
                    ):
                        return MovedPartition(self._source, 0, len(self._copies), self._nbytes(), 0.0)
                    if self._loop.time() + _PAUSE_S > self._deadline:
                        raise
                    log.info("%s; the move of partition %r goes on", error, self._name)
                    await asyncio.sleep(_PAUSE_S)
        finally:
            await self._clean_up()

    async def _move(self) -> MovedPartition:
        await self._to.welcomed(_REQUEST_S)
        for _ in range(_MOST_PASSES):
            left = self._missing((await self._export(hold=False))["state"])
            if sum(size for *_, size in left) <= _FEW_BYTES:
                break
            await self._copy_blocks(left)
        exported = await self._export(hold=True)
        state, held = exported["state"], self._loop.time()
        await self._copy_blocks(self._missing(state))
        self._sealed = exported["seal"]
        content = {**self._renamed(state), "clients": exported["clients"]}
        receive = Receive(self._name, self._sealed, self._source)
        await self._to.transfer(receive, [msgspec.msgpack.encode(content)], _REQUEST_S)
        proof = (await self._from.ask(Leave(self._name, self._sealed, self._target), _REQUEST_S)).value
        await self._to.ask(Settle(self._name, proof), _REQUEST_S)
        used = {tuple(block[:2]) for block in _blocks(state)}
        self._to.settle([[copy for place, copy in self._copies.items() if place in used]])
        rows = sum(partition["rows"] for partition in state["partitions"])
        return MovedPartition(self._source, rows, len(used), self._nbytes(), self._loop.time() - held)

    async def _export(self, *, hold: bool) -> dict[str, Any]:
        if self._loop.time() > self._deadline:
            raise WaitTimeoutError(f"partition {self._name!r} was not moved in time; it stays on shard {self._source}")
        payload = await self._from.transfer(Export(self._name, hold), (), _REQUEST_S)
        return msgspec.msgpack.decode(payload, type=dict)

    def _missing(self, state: dict[str, Any]) -> list[tuple[int, int, int]]:
        """Blocks as (unit, block, bytes) that are not copied yet."""
        if any(ref.block >> 32 != self._to.writer for ref, _ in self._copies.values()):
            self._copies.clear()  # the target gave this client up, and its blocks with it
        return [block for block in _blocks(state) if block[:2] not in self._copies]

    async def _copy_blocks(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        for window in windows(blocks, lambda block: block[2], _WINDOW_BLOCKS, _WINDOW_BYTES):
            fetched = await self._from.read_blocks(window, _REQUEST_S)
            try:
                for place, found in zip(window, fetched.blocks, strict=True):
                    whole = found.view.select(None, None)
                    self._copies[place[:2]] = await self._to.store_whole(whole, self._name, 0.0)
            finally:
                fetched.release()
            self._progress(sum(nbytes for *_, nbytes in window))

    def _renamed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with the copies in place of the blocks."""
        copies = [self._copies[block[:2]][0] for block in _blocks(state)]
        columns = {
            "unit": [copy.unit for copy in copies],
            "block": [copy.block for copy in copies],
            "nbytes": [copy.nbytes for copy in copies],
        }
        table = {name: np.array([0, *values], COLUMNS[name]).tobytes() for name, values in columns.items()}
        nbytes = sum(columns["nbytes"])
        partitions = [{**partition, "nbytes": nbytes} for partition in state["partitions"]]
        return {**state, "blocks": {**state["blocks"], **table}, "partitions": partitions}

    def _nbytes(self) -> int:
        return sum(ref.nbytes for ref, _ in self._copies.values())

    async def _clean_up(self) -> None:
        """Copies that the target has not taken over go with this client's session there. What is said here is only to
        be quick."""
        try:
            await self._from.ask(StopExport(self._name), _REQUEST_S)
        except TransferQueueError as error:
            log.info("%s", error)


def _blocks(state: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(unit, block, bytes) of each block of an exported state."""
    table = state["blocks"]
    columns = (np.frombuffer(table[name], COLUMNS[name])[1:].tolist() for name in ("unit", "block", "nbytes"))
    return list(zip(*columns, strict=True))
