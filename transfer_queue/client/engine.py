"""The client's work on the I/O loop: it stores and commits blocks, and finds and reads rows. It knows no tensors."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from transfer_queue.backoff import chance
from transfer_queue.client.backend import SessionBackend
from transfer_queue.client.connection_pool import CommitInDoubt, ConnectionPool
from transfer_queue.client.device_unit import DeviceUnits
from transfer_queue.client.io import close_in_forked_children
from transfer_queue.client.placement import Placement
from transfer_queue.client.reading import LoadedBatch, ReadPlan, plan_reads
from transfer_queue.client.session import ControllerSession
from transfer_queue.client.twins import is_blocking, on_loop
from transfer_queue.client.waiting import Waits
from transfer_queue.columns.block import EncodedBlock
from transfer_queue.config.attach import Target
from transfer_queue.config.security import PeerSecurity
from transfer_queue.control.commands import Batch, BlockRef, Command, Commit, Committed, Fetch, Lookup, Reply
from transfer_queue.control.directory import Shard
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    DataLostError,
    InvalidInputError,
    JournalWriteError,
    RequestError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.runtime.connection import Keepalive
from transfer_queue.runtime.tls import Credentials
from transfer_queue.storage.base import Backend, BlockRead, Fetched, UnitInfo
from transfer_queue.storage.memory.client import INLINE_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["Engine"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_MARGIN_S = 10.0
"""Time that the request of a parked fetch may take beyond the fetch."""
_WAIT_SLICE_S = 0.25
"""Time to wait for a full storage unit before another one is tried."""
_RETRY_S = 0.1
_ANY = Target()
_SPLIT_BYTES = 1 << 20
_MOST_SHORT = 1024
"""Most rows of a lookup that is sent in the thread of a blocking call."""


class Engine:
    """One client of one queue. Every coroutine runs on the I/O loop that made it; ``request``, ``put``, ``lookup``,
    ``load`` and ``find`` may begin in the thread of a blocking call, and go to the loop for what is not short."""

    def __init__(
        self,
        addresses: list[str],
        client_id: str,
        run_copy: Callable[[Callable[[], Any]], Any],
        security: PeerSecurity | None = None,
        shard: Shard | None = None,
        target: Target = _ANY,
    ) -> None:
        """Raises ConfigError for files of ``security``. ``shard``: see ControllerSession. ``target``: the expected
        queue."""
        security = security or PeerSecurity()
        self._credentials = Credentials(security, target)
        self._device_units = DeviceUnits(addresses, security, run_copy)
        keepalive = Keepalive(heartbeat_s=2.0, timeout_s=10.0)
        self._placement = Placement(seed=hash(client_id))
        self._waits = Waits()
        self._session = ControllerSession(
            addresses, client_id, keepalive, self._units_changed, self._credentials, shard, self._waits
        )
        self._backend = SessionBackend(self._session, client_id, run_copy, self._credentials, keepalive)
        self._changed = asyncio.Event()
        self._counter = itertools.count(1)
        self._pool = ConnectionPool(
            self._session, self._placement, self._credentials, client_id, self._counter, asyncio.get_running_loop()
        )
        self._pool.discard = self._discard_small
        self._tasks: set[asyncio.Task[Any]] = set()
        close_in_forked_children(self)

    async def open(self, timeout_s: float) -> None:
        """Attach to the controller. Raises ConnectionLostError."""
        await self._session.open(timeout_s)

    def start(self) -> None:
        """Begin to attach; requests wait for it."""
        self._session.start()

    async def welcomed(self, timeout_s: float) -> None:
        """See ControllerSession.welcomed."""
        if not self._session.welcome.run:
            await on_loop()
            await self._session.welcomed(timeout_s)

    @property
    def shard(self) -> Shard | None:
        """The controller of this engine, if there are several; None: the queue has one."""
        return self._session.shard

    @property
    def writer(self) -> int:
        """This client's number at the controller, for now."""
        return self._session.writer

    @property
    def guests(self) -> frozenset[str]:
        """Partitions that were moved to this controller before this client attached."""
        return self._session.guests

    async def close(self) -> None:
        """Close the connections. Pending calls raise NotInitializedError or ConnectionLostError."""
        self._pool.close()
        try:
            try:
                await self._device_units.close()
            finally:
                await self._backend.close()
        finally:
            self._session.close()
            self._changed.set()

    @property
    def ended(self) -> str:
        """See ControllerSession.ended."""
        return self._session.ended

    def give_up(self, reason: str) -> None:
        """See ControllerSession.give_up."""
        self._session.give_up(reason)
        self._changed.set()

    @property
    def run(self) -> str:
        """Identity of the life of what the controller holds."""
        return self._session.welcome.run

    @property
    def backend_kind(self) -> str:
        return self._session.welcome.backend

    @property
    def backend_settings(self) -> dict[str, Any]:
        return self._session.welcome.settings

    @property
    def controller_attributes(self) -> dict[str, Any]:
        return self._session.welcome.attributes

    @property
    def know_servers(self) -> bool:
        """See ``Credentials.know_servers``."""
        return self._credentials.know_servers

    @property
    def address(self) -> str:
        return self._session.address

    def beside(self, name: str, partition: str) -> str:
        """The name of a partition like ``name`` that fails only together with ``partition``."""
        return name

    @property
    def writable_units(self) -> int:
        """Number of storage units that accept new blocks."""
        return self._placement.writable_units

    def descriptors(self) -> list[int]:
        """Sockets that a forked child must close."""
        connections = [*self._backend.connections, *self._session.connections()]
        return [
            *(number for connection in connections if (number := connection.fileno()) >= 0),
            *self._pool.descriptors(),
        ]

    def abandon_in_child(self) -> None:
        self._backend.abandon_in_child()

    # ---------------------------------------------------------------------------------------------------------- control

    async def request(self, command: Command, timeout_s: float, reach_s: float | None = None) -> Reply:
        """See ControllerSession.request."""
        await on_loop()
        return await self._session.request(command, timeout_s, reach_s)

    async def fetch(self, command: Fetch, timeout_s: float, *, strict: bool = False) -> Batch:
        """``strict``: the wait ends in time also if the controller cannot be reached, with WaitTimeoutError."""
        await on_loop()
        reach_s = command.timeout_s if strict else None
        reply = await self._session.request(command, command.timeout_s + timeout_s + _MARGIN_S, reach_s)
        assert isinstance(reply, Batch)
        return reply

    # -------------------------------------------------------------------------------------------------------------- put

    async def put(
        self, block: EncodedBlock | None, commit: Commit, *, timeout_s: float, device: torch.device | None = None
    ) -> Committed:
        """Store ``block`` and make its rows ready with ``commit``, whose fields, blocks and lengths are set here.

        Waits for space and for the sample budget as long as ``commit.wait_s``. All or nothing: after an error nothing
        is stored. ``device``: on the GPU of its tensors, or on this one if none is on a GPU, if there is room;
        otherwise on storage units.
        Raises CapacityError, ConnectionLostError, and what the controller refuses.
        """
        if is_blocking():
            stored = block is not None and block.fields and device is None and self._backend.in_memory is not None
            done = self._pool.put(block, commit, self._see_through) if block is not None and stored else None
            if isinstance(done, Committed):
                return done
            await on_loop()
            if done is not None:
                with suppress(StorageKeyNotFoundError, DataLostError):  # as below: its unit went away
                    return await self._see_through_within(done, timeout_s)
        if block is None or not block.fields:
            return await self._commit(commit, [], timeout_s)
        for attempt in itertools.count(1):
            refs = await self._store_on_device(block, device) if device is not None else []
            refs = refs or await self._store(block, commit.wait_s, commit.partition)
            filled = msgspec.structs.replace(
                commit, fields=block.fields, blocks=[ref for ref, _ in refs], lengths=block.lengths
            )
            try:
                return await self._commit(filled, refs, timeout_s)
            except (StorageKeyNotFoundError, DataLostError):
                # The unit went away between store and commit, or came back and freed what it did not know.
                if attempt == 3:
                    raise
            except RequestError:
                # So did this client's session, after a stall that was too long; its blocks went with it.
                if attempt == 3 or all(ref.block >> 32 == self._session.writer for ref, _ in refs):
                    raise
        raise AssertionError("unreachable")

    def _see_through(self, doubt: CommitInDoubt) -> None:
        """Repeat a commit that nobody waits for."""
        task = self._spawn(self._see_through_within(doubt, _MARGIN_S))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _see_through_within(self, doubt: CommitInDoubt, timeout_s: float) -> Committed:
        work = self._commit_or_discard(doubt.commit, [(doubt.ref, doubt.unit)], timeout_s, doubt.begun)
        return await asyncio.shield(self._spawn(work))

    def _discard_small(self, block: int, info: UnitInfo) -> None:
        """Drop a block that was stored over a connection of the pool that broke."""
        self._spawn(self._backend.discard(block, info))

    async def _commit(self, commit: Commit, refs: Sequence[tuple[BlockRef, UnitInfo]], timeout_s: float) -> Committed:
        # A commit that is under way is seen through: giving up on it would leave its outcome unknown.
        return await asyncio.shield(self._spawn(self._commit_or_discard(commit, refs, timeout_s)))

    async def _commit_or_discard(
        self,
        commit: Commit,
        refs: Sequence[tuple[BlockRef, UnitInfo]],
        timeout_s: float,
        begun: tuple[int, int] | None = None,
    ) -> Committed:
        try:
            reply = await self._session.request(commit, commit.wait_s + timeout_s, begun=begun)
        except (ConnectionLostError, JournalWriteError, WaitTimeoutError):
            # Perhaps committed; blocks that are not go with this writer's session, or when the controller says so.
            self._device_units.doubt([ref for ref, _ in refs])
            raise
        except TransferQueueError:
            await self._discard(refs)
            raise
        assert isinstance(reply, Committed)
        self.settle([refs])
        return reply

    async def _store_on_device(self, block: EncodedBlock, device: torch.device) -> list[tuple[BlockRef, UnitInfo]]:
        """Store a block on the GPU of its tensors, else on ``device``; nothing if there is no room, or if it is dropped
        meanwhile. Raises InvalidInputError."""
        backend = await self._backend.ready()
        if self.backend_kind != "simple" or self.shard is not None:
            what = "several controllers" if self.shard is not None else f"the backend {self.backend_kind}"
            raise InvalidInputError(
                f"placement 'device' does not work in a queue with {what}; leave placement out, or use the backend "
                "simple and one controller"
            )
        number = (self._backend.writer << 32) | next(self._counter)
        assert backend.capabilities.tracks_writers
        try:
            return [await self._device_units.put(block, number, self._session.local_host, device)]
        except (CapacityError, StorageKeyNotFoundError) as error:
            log.info("a put goes to storage units of the host: %s", error)
            return []

    async def _store(self, block: EncodedBlock, wait_s: float, scope: str) -> list[tuple[BlockRef, UnitInfo]]:
        """Store a block on a unit, or in parts by rows on several units if no unit has room for all of it.

        Waits up to ``wait_s`` seconds for room, and for units while none is reachable. Raises CapacityError,
        ConnectionLostError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        reason = ""
        with self._waits.on("a storage unit", deadline, lambda: reason or self._backend.silence()):
            if block.nbytes <= INLINE_BYTES and self._backend.writer == self._session.writer:
                with suppress(CapacityError, ConnectionLostError):  # most often a small block finds its place at once
                    return [await self._store_one(await self._backend.ready(), block, 0, 0.0, scope)]
            while True:
                try:
                    backend = await self._backend.ready()
                    await self._wait_for_units(deadline, wait_s)
                    return await self._store_until(backend, block, deadline, scope)
                except ConnectionLostError as error:
                    self._session.check_open()
                    left = deadline - loop.time()
                    if left <= 0:
                        raise self._session.lost() or error from None
                    reason = str(self._session.lost() or error)
                    await asyncio.sleep(min(left, _WAIT_SLICE_S))

    async def _store_until(
        self, backend: Backend, block: EncodedBlock, deadline: float, scope: str
    ) -> list[tuple[BlockRef, UnitInfo]]:
        loop = asyncio.get_running_loop()
        self._placement.check_rows(block)
        parts = min(self._placement.parts(block.nbytes, backend.capabilities.max_block_bytes), max(1, block.rows))
        while True:
            try:
                return await self._store_parts(backend, block, parts, 0.0, scope)
            except CapacityError:
                pass
            more = max(parts, self._placement.writable_units)
            if more > parts and block.rows >= more and block.nbytes >= _SPLIT_BYTES:
                try:
                    return await self._store_parts(backend, block, more, 0.0, scope)
                except CapacityError:
                    pass
            now = loop.time()
            left = deadline - now
            try:
                return await self._store_parts(backend, block, parts, max(0.0, min(_WAIT_SLICE_S, left)), scope)
            except CapacityError:
                if left <= _WAIT_SLICE_S:
                    raise
            if loop.time() - now < _WAIT_SLICE_S / 2:  # refused at once: too many of this client's puts wait
                await asyncio.sleep(_WAIT_SLICE_S * (0.5 + chance() / 2))

    async def _store_parts(
        self, backend: Backend, block: EncodedBlock, parts: int, wait_s: float, scope: str
    ) -> list[tuple[BlockRef, UnitInfo]]:
        if parts == 1:
            return [await self._store_one(backend, block, 0, wait_s, scope)]
        bounds = [block.rows * number // parts for number in range(parts + 1)]
        stored: list[tuple[BlockRef, UnitInfo]] = []
        try:
            for start, stop in itertools.pairwise(bounds):
                stored.append(await self._store_one(backend, block.select(None, (start, stop)), start, wait_s, scope))
        except BaseException:
            await self._discard(stored)
            raise
        return stored

    async def _store_one(
        self, backend: Backend, block: EncodedBlock | BlockRead, row_start: int, wait_s: float, scope: str
    ) -> tuple[BlockRef, UnitInfo]:
        """Store on the first unit that takes it. Raises CapacityError, ConnectionLostError if none does."""
        failure: TransferQueueError | None = None
        store: Any = backend.copy if isinstance(block, BlockRead) else backend.put
        rows = 0 if isinstance(block, BlockRead) else block.rows  # of a copy they do not matter
        for info in self._placement.candidates(block.nbytes or 0):
            number = (self._backend.writer << 32) | next(self._counter)
            if "ticket" in self._session.welcome.attributes:
                self._backend.scopes[number] = scope
            if not backend.capabilities.tracks_writers:
                self._session.announce(info.unit, number)
            try:
                nbytes = await store(block, number, info, wait_s=wait_s)
            except CapacityError as error:
                failure = error
                self._session.withdraw(number)
                self._placement.move_on()
            except ConnectionLostError as error:
                failure = failure or error
                self._placement.move_on()
            else:
                return BlockRef(info.unit, number, row_start, rows, nbytes), info
            finally:
                self._backend.scopes.pop(number, None)
        if failure is None:
            raise CapacityError(
                f"no storage unit has capacity for a block of {block.nbytes} bytes; put smaller batches"
            )
        raise failure

    async def _discard(self, refs: Sequence[tuple[BlockRef, UnitInfo]]) -> None:
        for ref, info in refs:
            if not await self._device_units.discard(ref.block, info.unit):
                await self._backend.discard(ref.block, info)
            self._session.settled(ref.block)

    async def _wait_for_units(self, deadline: float, wait_s: float) -> None:
        """Units may be joining, or coming back."""
        reason = f"none is registered with the controller at {self.address}"
        with self._waits.on("storage units", deadline, lambda: str(self._session.lost() or reason)):
            while not self._placement.writable_units:
                self._session.check_open()
                self._changed.clear()
                left = deadline - asyncio.get_running_loop().time()
                try:
                    await asyncio.wait_for(self._changed.wait(), max(0.0, left))
                except (TimeoutError, asyncio.TimeoutError):
                    if lost := self._session.lost():
                        raise lost from None
                    raise CapacityError(
                        f"no storage unit registered with the controller at {self.address} within {wait_s:g} s "
                        "(TQ_PUT_WAIT), so there is no capacity; start storage units"
                    ) from None

    # -------------------------------------------------------------------------------------------------------------- get

    async def lookup(self, command: Lookup, timeout_s: float) -> Batch:
        if is_blocking():
            short = self._backend.in_memory is not None and _is_short(command)
            found = self._pool.request(command) if short else None
            if found is not None:
                assert isinstance(found, Batch)
                return found
            await on_loop()
        reply = await self._session.request(command, timeout_s)
        assert isinstance(reply, Batch)
        return reply

    async def load(self, batch: Batch, fields: Sequence[str], again: Lookup | None, timeout_s: float) -> LoadedBatch:
        """Read ``fields`` of all rows of a located batch.

        Rows that were overwritten, or whose unit went away, since they were located are looked up ``again``.
        Raises StorageKeyNotFoundError, DataLostError, ConnectionLostError.
        """
        if is_blocking():
            with suppress(DataLostError):
                plan = plan_reads(batch, fields, self._placement.get)
                memory = self._backend.in_memory
                read = None if memory is None else self._pool.read(memory, plan.reads)
                if read is not None:
                    return LoadedBatch(batch, fields, plan, read)
            await on_loop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        gone: list[int] = []
        attempts = 0
        reason = ""
        with self._waits.on("a storage unit", deadline, lambda: reason or self._backend.silence()):
            while True:
                try:
                    plan = plan_reads(batch, fields, self._placement.get)
                    if not plan.reads:
                        return LoadedBatch(batch, fields, ReadPlan([], [], []), None)
                    backend = await self._backend.ready()
                    fetched = await backend.get(plan.reads, timeout_s=max(0.001, deadline - loop.time()))
                    return LoadedBatch(batch, fields, plan, fetched)
                except StorageKeyNotFoundError:
                    # Overwritten since it was located: the next try finds the new blocks, however often that happens.
                    # Blocks that stay gone are lost.
                    blocks = [read.block for read in plan.reads]
                    attempts = attempts + 1 if blocks == gone else 1
                    gone = blocks
                    if again is None or attempts >= 5 or loop.time() >= deadline:
                        raise
                except (ConnectionLostError, DataLostError) as error:
                    reason = str(error)
                    if again is None or loop.time() + _RETRY_S >= deadline:
                        raise self._session.lost() or error from None
                    await asyncio.sleep(_RETRY_S)  # until the controller has noticed too, or the unit has reconnected
                batch = await self.lookup(again, max(0.001, deadline - loop.time()))

    async def find(self, command: Lookup, fields: Sequence[str], guess: Batch | None, timeout_s: float) -> LoadedBatch:
        """Look up rows and read ``fields`` of all of them.

        ``guess``: the same rows as they were located earlier. They are read from there while they are looked up, and
        what was read counts only if they still lie there, so an old guess costs a second read and nothing else.
        Raises what ``lookup`` and ``load`` raise.
        """
        if is_blocking():
            memory = self._backend.in_memory
            if self._pool.ready and memory is not None and memory.may_be_small([]):
                return await self.load(await self.lookup(command, timeout_s), fields, command, timeout_s)
            await on_loop()
        deadline = asyncio.get_running_loop().time() + timeout_s
        reading = None if guess is None else self._spawn(self.load(guess, fields, None, timeout_s))
        try:
            batch = await self.lookup(command, timeout_s)
            if guess is not None and reading is not None:
                with suppress(ConnectionLostError, DataLostError, StorageKeyNotFoundError, WaitTimeoutError):
                    plan = plan_reads(batch, fields, self._placement.get)
                    if plan.same_as(plan_reads(guess, fields, self._placement.get)):
                        loaded = (await asyncio.shield(reading)).of(batch)
                        reading = None
                        return loaded
        finally:
            if reading is not None:
                reading.add_done_callback(_release_read)
        left_s = deadline - asyncio.get_running_loop().time()
        return await self.load(batch, fields, command, max(0.001, left_s))

    # ------------------------------------------------------------------------------------------------- whole blocks

    async def transfer(self, message: Any, payload: Sequence[memoryview | bytes], timeout_s: float) -> Any:
        """See ControllerSession.transfer; returns the payload of the reply."""
        return (await self._session.transfer(message, payload, timeout_s))[1]

    async def ask(self, message: Any, timeout_s: float) -> Any:
        """The reply to a request that may be repeated or lost. Raises as ``transfer``."""
        return (await self._session.transfer(message, (), timeout_s))[0]

    async def read_blocks(self, blocks: Sequence[tuple[int, int, int]], timeout_s: float) -> Fetched:
        """Blocks given as (unit, block, bytes), all of each. Raises as ``load`` does, at once."""
        backend = await self._backend.ready()
        reads = []
        for unit, block, nbytes in blocks:
            info = self._placement.get(unit)
            if info is None:
                raise DataLostError(f"storage unit {unit} is gone")
            reads.append(BlockRead(info, block, nbytes=nbytes))
        return await backend.get(reads, timeout_s=timeout_s)

    async def store_blocks(
        self, blocks: Sequence[EncodedBlock], partitions: Sequence[str], wait_s: float, timeout_s: float
    ) -> list[list[tuple[BlockRef, UnitInfo]]]:
        """Store blocks of these partitions without a commit; each may come to lie in several parts. All or none."""
        stores = [self._store(block, wait_s, name) for block, name in zip(blocks, partitions, strict=True)]
        results = await asyncio.gather(*stores, return_exceptions=True)
        stored = [result for result in results if not isinstance(result, BaseException)]
        for result in results:
            if isinstance(result, BaseException):
                await self.discard_blocks(stored)
                raise result
        return stored

    async def store_whole(self, block: EncodedBlock, partition: str, wait_s: float) -> tuple[BlockRef, UnitInfo]:
        """Store a block of ``partition`` undivided, without a commit. Raises CapacityError, ConnectionLostError."""
        backend = await self._backend.ready()
        return await self._store_one(backend, block, 0, wait_s, partition)

    async def copy_block(self, unit: int, block: int, nbytes: int, partition: str) -> tuple[BlockRef, UnitInfo] | None:
        """Store a copy of a block as ``store_whole`` does, with memory for a part of it; None: the backend cannot.

        Raises also StorageKeyNotFoundError, DataLostError.
        """
        backend, info = await self._backend.ready(), self._placement.get(unit)
        if info is None:
            raise DataLostError(f"storage unit {unit} is gone")
        source = BlockRead(info, block, nbytes=nbytes)
        return await self._store_one(backend, source, 0, 0.0, partition) if backend.capabilities.copies else None

    async def discard_blocks(self, stored: Sequence[Sequence[tuple[BlockRef, UnitInfo]]]) -> None:
        """Drop what ``store_blocks`` stored."""
        for refs in stored:
            await self._discard(refs)

    def settle(self, stored: Sequence[Sequence[tuple[BlockRef, UnitInfo]]]) -> None:
        """The controller has taken over what ``store_blocks`` or ``store_whole`` stored."""
        for refs in stored:
            for ref, _ in refs:
                self._session.settled(ref.block)

    def _units_changed(self, units: list[UnitInfo]) -> None:
        self._placement.update(units)
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_short(command: Lookup) -> bool:
    named = len(command.indexes or b"") // 8 if command.keys is None else len(command.keys)
    return 0 < named <= _MOST_SHORT


def _release_read(reading: asyncio.Task[LoadedBatch]) -> None:
    """Release a read whose result and error are not used."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().release()
