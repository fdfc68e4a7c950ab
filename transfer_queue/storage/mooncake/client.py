"""Client side of the Mooncake backend: blocks go between registered buffers and the units' segments."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from transfer_queue.backoff import Backoff
from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.copying import copy_bytes
from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.storage.base import (
    Backend,
    BackendContext,
    BlockRead,
    Capabilities,
    Fetched,
    FetchedBlock,
    UnitInfo,
)
from transfer_queue.storage.mooncake import codes
from transfer_queue.storage.mooncake.buffers import Bytes, Lease, RegisteredPool, copy_into
from transfer_queue.storage.mooncake.oplog import Follower
from transfer_queue.storage.mooncake.parts import (
    HEADER_BYTES,
    SMALLEST_BLOCK,
    Part,
    Range,
    block_key,
    in_batches,
    in_groups,
    is_partial,
    overlaps,
    parts_of,
    wanted_ranges,
)
from transfer_queue.storage.mooncake.settings import MooncakeSettings, parse_settings, role_from
from transfer_queue.storage.mooncake.sources import IN_PLACE_BYTES, Source, in_place, packed
from transfer_queue.storage.mooncake.store import Store, open_store

__all__ = ["MooncakeBackend", "open_backend"]

T = TypeVar("T")

_CALL_BYTES = 256 << 20
"""One call of the engine moves no more than this, so that it ends before the lease of its first key does."""
_WAIT_FOR_SPACE_S = (0.02, 1.0)
_HEAL_S = (0.05, 0.2, 0.5)
"""Pauses before a failed transfer is repeated."""
_FETCH_ALIGN = 64
_LOG_S = 2.0
"""A stored key that is not in the log of the masters after this long may have gone with their leader."""


class _UnregisteredError(Exception):
    """The memory of a put could not be registered."""


class _Fetched(Fetched):
    """Views over a registered buffer, or over memory of their own."""

    def __init__(self, blocks: list[FetchedBlock], lease: Lease | None) -> None:
        self.blocks = blocks
        self._lease = lease
        self.is_own = lease is None or lease.keep()

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


@dataclass(eq=False)
class _Write:
    """Values to be stored on a unit, each as pieces, some in memory of ``lease``; ``fill`` writes them there."""

    unit: UnitInfo
    values: dict[str, list[Bytes]]
    lease: Lease
    outcome: asyncio.Future[dict[str, int]]
    fill: Callable[[Bytes], None] | None = None
    failed: dict[str, int] | Exception = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for value in self.values.values() for piece in value)

    def filled(self) -> bool:
        """Fill the memory; an error is kept for the put, it does not concern the others."""
        try:
            if self.fill is not None:
                self.fill(self.lease.array)
        except Exception as error:  # noqa: BLE001 (boundary: the buffers are the caller's)
            self.failed = error
            return False
        return True

    def settle(self, result: dict[str, int] | Exception) -> None:
        if self.outcome.done():
            return
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


class MooncakeBackend(Backend):
    """See ``storage.base.Backend``.

    Calls of the engine block, so they run on the client's worker thread, one at a time: the engine moves the bytes with
    threads of its own, and more callers do not make it faster.
    """

    name = "mooncake"
    capabilities = Capabilities(copies=True, reports_capacity=True)

    def __init__(self, context: BackendContext, settings: MooncakeSettings, store: Store) -> None:
        self._context = context
        self._settings = settings
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Future[Any]] = set()
        self._writes: list[_Write] = []
        self._writing = False
        self._closed = False
        self._log = settings.master_log()
        self._log_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tq-mooncake-log")
        self._follower = Follower(self._log, self._on_log_thread) if self._log else None
        self.pool = RegisteredPool(
            settings.buffer_bytes_of(role_from(os.environ)),
            store.register,
            store.unregister,
            context.run_copy,
            pinned=settings.protocol == "rdma",
        )

    # ---------------------------------------------------------------------------------------------------------- put

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        self._check_open()
        nbytes = block.nbytes
        if nbytes > unit.capacity:
            raise CapacityError(
                f"a block of {nbytes} bytes exceeds the capacity of storage unit {unit.name}, {unit.capacity} bytes"
            )
        deadline = self._loop.time() + wait_s
        parts = parts_of(self._context.run, block_id, nbytes, self._settings.part_bytes)
        try:
            # A block that is too long for the buffers goes through a window, a few parts at a time.
            fits = nbytes <= self.pool.limit // 2
            groups = [parts] if fits else list(in_groups(parts, self._settings.part_bytes))
            if self._store.sends_in_place and nbytes >= IN_PLACE_BYTES:
                with suppress(_UnregisteredError):  # then all of it goes through buffers
                    await self._put_in_place(block, groups, unit, deadline, wait_s)
                    return nbytes
            if fits:
                await self._put_group(packed(parts, block.write_into), unit, deadline, wait_s)
            else:
                rest: deque[Any] = deque(block.segments())
                for group in groups:
                    source = packed(group, lambda target: copy_into(target, rest))
                    await self._put_group(source, unit, deadline, wait_s)
        except BaseException as error:
            # After the worker's last work for this put, also if the caller has given up.
            removal = self._in_background(self._call(lambda: self._remove(parts)))
            if isinstance(error, CapacityError):  # the controller forgets a refused block: nothing may be left of it
                await asyncio.shield(removal)
            raise
        return nbytes

    async def copy(self, source: BlockRead, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        self._check_open()
        deadline = self._loop.time() + wait_s
        sizes = await self._sizes([source], self._loop.time() + self._settings.call_timeout)
        nbytes = sizes[source.block]
        olds, parts = (
            parts_of(self._context.run, block, nbytes, self._settings.part_bytes) for block in (source.block, block_id)
        )
        try:
            for old, new in zip(olds, parts, strict=True):
                give_up = self._loop.time() + self._settings.call_timeout
                lease = await self._take(new.nbytes, give_up)
                try:
                    await self._read_group({old.key: lease.array}, lease, give_up)
                    write = _Write(unit, {new.key: [lease.array]}, lease, self._loop.create_future())
                    await self._write_for_good(write, deadline, wait_s)
                finally:
                    lease.release()
        except BaseException:
            await asyncio.shield(self._in_background(self._call(lambda: self._remove(parts))))
            raise
        return nbytes

    def _remove(self, parts: Sequence[Part]) -> None:
        self._store.remove([part.key for part in parts])

    async def _put_in_place(
        self, block: EncodedBlock, groups: list[list[Part]], unit: UnitInfo, deadline: float, wait_s: float
    ) -> None:
        segments = await self._call(lambda: deque(np.frombuffer(part, np.uint8) for part in block.segments()))
        for group in groups:
            source = await self._call(partial(in_place, group, segments))
            await self._put_group(source, unit, deadline, wait_s)

    async def _put_group(self, source: Source, unit: UnitInfo, deadline: float, wait_s: float) -> None:
        """Store consecutive parts."""
        needed = source.buffer_bytes
        try:
            lease = await self.pool.take(needed, max(deadline, self._loop.time() + self._settings.call_timeout))
        except asyncio.TimeoutError:
            raise CapacityError(f"no buffer for {needed} bytes: {self._exhausted()}") from None
        try:
            write = _Write(unit, source.values(lease.array), lease, self._loop.create_future(), source.fill)
            await self._write_for_good(write, deadline, wait_s)
        finally:
            lease.release()

    async def _write_for_good(self, write: _Write, deadline: float, wait_s: float) -> None:
        if self._follower is None:
            await self._store_all(write, deadline, wait_s)
        else:
            await self._store_for_good(self._follower, write, deadline, wait_s)

    async def _store_all(self, write: _Write, deadline: float, wait_s: float) -> None:
        """Write until the leader has all values. Raises CapacityError, ConnectionLostError, _UnregisteredError."""
        unit, values, total = write.unit, write.values, write.nbytes
        failed = await self._write(write)
        backoff, heals = Backoff(*_WAIT_FOR_SPACE_S), iter(_HEAL_S)
        while failed:
            code, keys = min(failed.values()), list(failed)
            if code in codes.RETRIED:
                pause = next(heals, None)
                if pause is None:
                    raise ConnectionLostError(
                        f"storage unit {unit.name} cannot be written: {codes.explain(code, keys)}"
                    )
            elif code == codes.NO_SPACE:
                if self._loop.time() >= deadline:
                    raise CapacityError(
                        f"storage unit {unit.name} has no capacity left for a block of {total} bytes, and none "
                        f"became free within {wait_s:g} s; clear consumed rows or raise the capacity of the units"
                    )
                pause = min(backoff.next_s(), max(0.0, deadline - self._loop.time()))
            elif code == codes.UNREGISTERED:
                raise _UnregisteredError
            else:
                raise _lost(code, keys)
            await asyncio.sleep(pause)
            again = {key: values[key] for key in keys}
            failed = await self._write(_Write(unit, again, write.lease, self._loop.create_future()))

    async def _store_for_good(self, follower: Follower, write: _Write, deadline: float, wait_s: float) -> None:
        """Write until the log of the masters has all values, so that they outlive the leader.

        Raises the errors of `_store_all`.
        """
        values = write.values
        await follower.expect(values)
        try:
            while True:
                await self._store_all(write, deadline, wait_s)
                gone = await self._gone_with_leader(follower, list(write.values))
                if not gone:
                    return
                again = {key: values[key] for key in gone}
                write = _Write(write.unit, again, write.lease, self._loop.create_future())
        finally:
            follower.forget(values)

    async def _gone_with_leader(self, follower: Follower, keys: list[str]) -> list[str]:
        """Keys that were stored and that the masters do not know any more, once the others are in their log."""
        give_up = self._loop.time() + self._settings.call_timeout
        while missing := await follower.missing(keys, _LOG_S):
            states = dict(zip(missing, await self._call(partial(self._store.verify, missing)), strict=True))
            if all(code == codes.GONE for code in states.values()):
                return missing
            if self._loop.time() >= give_up:
                if unknown := [key for key, code in states.items() if code not in (0, codes.GONE)]:
                    raise _lost(states[unknown[0]], unknown)
                raise ConnectionLostError(
                    f"not in the log of the Mooncake masters after {self._settings.call_timeout:g} s; check that their "
                    f"etcd answers: {', '.join(missing)}"
                )
        return []

    async def _on_log_thread(self, job: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._log_thread, job)

    async def _write(self, write: _Write) -> dict[str, int]:
        """Store values, together with other values that wait for the same unit; returns the codes that are not 0.

        A call of the engine for many keys is twice as fast as a call for each (measured with values of 1 MB).
        """
        self._writes.append(write)
        if not self._writing:
            self._writing = True
            self._in_background(self._write_queued())
        try:
            return await write.outcome
        finally:
            with suppress(ValueError):  # given up before its turn came
                self._writes.remove(write)

    async def _write_queued(self) -> None:
        try:
            while self._writes:
                unit, total = self._writes[0].unit, 0
                batch: list[_Write] = []
                for write in self._writes:
                    if write.unit.unit == unit.unit and (not batch or total + write.nbytes <= _CALL_BYTES):
                        batch.append(write)
                        total += write.nbytes
                self._writes = [write for write in self._writes if write not in batch]
                try:
                    await self._call(partial(self._write_batch, batch, unit), *(write.lease for write in batch))
                except Exception as error:  # noqa: BLE001 (boundary: every waiting put gets it)
                    for write in batch:
                        write.settle(error)
                for write in batch:
                    write.settle(write.failed)
        finally:
            self._writing = False

    def _write_batch(self, batch: list[_Write], unit: UnitInfo) -> None:
        """Worker thread: store values on ``unit`` and nowhere else.

        The engine takes another segment when the wanted one is full. Blocks that lie elsewhere than the controller
        believes would be lost unnoticed with that other unit.
        """
        values: dict[str, list[Bytes]] = {}
        for write in batch:
            if write.filled():
                values.update(write.values)
        keys = list(values)
        segment, endpoint = unit.attributes["segment"], unit.attributes["endpoint"]
        results = dict(zip(keys, self._store.write(keys, list(values.values()), segment), strict=True))
        stored = [key for key, code in results.items() if code == 0]
        places = self._store.places(stored) if stored else {}
        strayed = [key for key in stored if key in places and places[key][1] != endpoint]
        if strayed:
            self._store.remove(strayed)
            results.update(dict.fromkeys(strayed, codes.NO_SPACE))
        results.update({key: codes.NOT_REACHED for key in stored if key not in places})
        for write in batch:
            if not isinstance(write.failed, Exception):
                write.failed = {key: results[key] for key in write.values if results[key]}

    # ---------------------------------------------------------------------------------------------------------- get

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        self._check_open()
        deadline = self._loop.time() + timeout_s
        sizes = await self._sizes(reads, deadline)
        starts: dict[int, int] = {}  # a block read twice is moved once
        total = 0
        for block, nbytes in sizes.items():
            starts[block] = total
            total += -(-nbytes // _FETCH_ALIGN) * _FETCH_ALIGN
        parts = [
            (part, starts[block] + part.start)
            for block, nbytes in sizes.items()
            for part in parts_of(self._context.run, block, nbytes, self._settings.part_bytes)
        ]
        lease = await self._take(total, deadline) if 0 < total <= self.pool.limit // 2 else None
        memory = np.empty(total, np.uint8) if lease is None else lease.array
        try:
            if lease is not None and self._store.reads_ranges:
                parts = await self._read_in_part(reads, sizes, starts, parts, lease, deadline)
            await self._read_all(parts, memory, lease, deadline)
            blocks = [
                FetchedBlock(BlockView(memory[starts[read.block] :][: sizes[read.block]]), read.rows) for read in reads
            ]
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return _Fetched(blocks, lease)

    async def _read_in_part(
        self,
        reads: Sequence[BlockRead],
        sizes: dict[int, int],
        starts: dict[int, int],
        parts: list[tuple[Part, int]],
        lease: Lease,
        deadline: float,
    ) -> list[tuple[Part, int]]:
        """Read blocks of which little is wanted to their places; the parts that are left to be read whole."""
        reads_of: dict[int, list[BlockRead]] = {}
        for read in reads:
            if sizes[read.block] >= SMALLEST_BLOCK:
                reads_of.setdefault(read.block, []).append(read)
        partial_reads = {block: each for block, each in reads_of.items() if is_partial(each)}
        if not partial_reads:
            return parts
        memory = lease.array
        places: dict[str, tuple[int, Part, int]] = {}  # key -> block, part, start in memory
        for block in partial_reads:
            for part in parts_of(self._context.run, block, sizes[block], self._settings.part_bytes):
                places[part.key] = (block, part, starts[block] + part.start)

        async def read_ranges(wanted: dict[int, list[Range]]) -> None:
            targets, ranges = {}, {}
            for key, (block, part, start) in places.items():
                inside = overlaps(part, wanted.get(block, ()))
                if inside:
                    targets[key], ranges[key] = memory[start : start + part.nbytes], inside
            await self._read_group(targets, lease, deadline, ranges)

        await read_ranges({block: [(0, HEADER_BYTES)] for block in partial_reads})
        found: dict[int, list[Range]] = {}
        for block, each in partial_reads.items():
            ranges = wanted_ranges(memory[starts[block] : starts[block] + sizes[block]], each)
            if ranges is not None:
                found[block] = ranges
        await read_ranges(found)
        done = {key for key, (block, _, _) in places.items() if block in found}
        return [(part, start) for part, start in parts if part.key not in done]

    async def _sizes(self, reads: Sequence[BlockRead], deadline: float) -> dict[int, int]:
        sizes = {read.block: read.nbytes for read in reads if read.nbytes is not None}
        unknown = list({read.block: None for read in reads if read.block not in sizes})
        if unknown:
            sizes.update(
                await self._call(lambda: self._store.block_sizes(self._context.run, unknown), deadline=deadline)
            )
            absent = [block for block in unknown if block not in sizes]
            if absent:
                raise _lost(codes.GONE, [block_key(self._context.run, block) for block in absent])
        return sizes

    async def _read_all(
        self, parts: list[tuple[Part, int]], memory: Bytes, lease: Lease | None, deadline: float
    ) -> None:
        """Read each part to its place in ``memory``, which is registered if there is a ``lease``."""
        if lease is not None:
            for group in in_batches(parts, _CALL_BYTES):
                targets = {part.key: memory[start : start + part.nbytes] for part, start in group}
                await self._read_group(targets, lease, deadline)
            return
        window_bytes = max(self._settings.part_bytes, min(_CALL_BYTES, self.pool.limit // 4))
        for group in in_batches(parts, window_bytes):
            window = await self._take(sum(part.nbytes for part, _ in group), deadline)
            try:
                targets, position = {}, 0
                for part, _ in group:
                    targets[part.key] = window.array[position : position + part.nbytes]
                    position += part.nbytes

                await self._read_group(targets, window, deadline)
                await self._call(partial(_copy_out, group, targets, memory), window, deadline=deadline)
            finally:
                window.release()

    async def _read_group(
        self, targets: dict[str, Bytes], lease: Lease, deadline: float, ranges: dict[str, list[Range]] | None = None
    ) -> None:
        """Fill targets, or only ``ranges`` of each."""
        heals = iter(_HEAL_S)
        while targets:
            failed = await self._call(partial(self._read, targets, ranges), lease, deadline=deadline)
            hopeless = {key: code for key, code in failed.items() if code not in codes.RETRIED}
            pause = next(heals, None)
            if hopeless or (failed and pause is None):
                chosen = hopeless or failed
                code = min(chosen.values())
                raise _lost(code, [key for key in chosen if chosen[key] == code])
            targets = {key: targets[key] for key in failed}
            if targets:
                await asyncio.sleep(pause or 0)

    def _read(self, targets: dict[str, Bytes], ranges: dict[str, list[Range]] | None) -> dict[str, int]:
        """Worker thread: fill targets; returns the codes that are not 0."""
        keys, places = list(targets), list(targets.values())
        if ranges is None:
            found = self._store.read(keys, places)
        else:
            found = self._store.read_ranges(keys, places, [ranges[key] for key in keys])
        results = dict(zip(keys, found, strict=True))
        filled = [key for key, code in results.items() if code == 0]
        if filled:
            results.update(zip(filled, self._store.verify(filled), strict=True))
        return {key: code for key, code in results.items() if code}

    # -------------------------------------------------------------------------------------------------------- other

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        self._in_background(self._call(lambda: self._store.remove_blocks(self._context.run, [block_id])))

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("this client of Mooncake is closed")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._background:
            await asyncio.wait(self._background, timeout=self._settings.call_timeout)
        with suppress(ConnectionLostError):  # a stuck engine ends with the process
            await self._bounded(self.pool.close())
            await self._call(self._store.close)
        if self._log is not None:
            self._log_thread.submit(self._log.close)
        self._log_thread.shutdown(wait=False)

    def abandon_in_child(self) -> None:
        """Drop the engine after a fork: its threads are gone, and its connections belong to the parent."""
        self._store.abandon()

    async def _take(self, nbytes: int, deadline: float) -> Lease:
        try:
            return await self.pool.take(nbytes, deadline)
        except asyncio.TimeoutError:
            raise WaitTimeoutError(f"no buffer for {nbytes} bytes in time: {self._exhausted()}") from None

    def _exhausted(self) -> str:
        return (
            f"all {self.pool.limit} bytes of buffers are in use by other transfers and by views that are not released; "
            "raise zeroCopy.tensorBufferSize"
        )

    async def _call(self, job: Callable[[], T], *leases: Lease, deadline: float | None = None) -> T:
        """Run a blocking job on the worker thread. ``leases`` stay taken until the job has really ended.

        Raises WaitTimeoutError at ``deadline``, ConnectionLostError after ``call_timeout``.
        """
        for lease in leases:
            lease.hold()
        task = asyncio.ensure_future(self._context.run_copy(job))
        self._background.add(task)

        def ended(done: asyncio.Future[T]) -> None:
            self._background.discard(done)
            for lease in leases:
                lease.release()
            if not done.cancelled():
                done.exception()  # retrieved, also if no caller waits

        task.add_done_callback(ended)
        limit = self._settings.call_timeout
        late: TransferQueueError = ConnectionLostError(f"Mooncake did not answer within {limit:g} s")
        if deadline is not None and deadline - self._loop.time() < limit:
            limit, late = max(0.0, deadline - self._loop.time()), WaitTimeoutError("Mooncake did not answer in time")
        done, _ = await asyncio.wait([task], timeout=limit)
        if not done:
            raise late
        return task.result()

    async def _bounded(self, work: Any) -> None:
        try:
            await asyncio.wait_for(work, self._settings.call_timeout)
        except asyncio.TimeoutError:
            raise ConnectionLostError("Mooncake did not answer in time") from None

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._background.discard(done)
        if not done.cancelled():
            done.exception()  # the controller has the block freed once this client is gone


def _lost(code: int, keys: Sequence[str]) -> TransferQueueError:
    if code == codes.GONE:
        return StorageKeyNotFoundError(
            f"gone from storage, cleared or lost with a unit or the master: {', '.join(keys)}"
        )
    return ConnectionLostError(codes.explain(code, keys))


def _copy_out(group: list[tuple[Part, int]], sources: dict[str, Bytes], memory: Bytes) -> None:
    for part, start in group:
        copy_bytes(memory[start : start + part.nbytes], sources[part.key])


async def open_backend(context: BackendContext) -> MooncakeBackend:
    """Raises ConfigError, StartError."""
    settings = parse_settings(context.settings)
    return MooncakeBackend(context, settings, await context.run_copy(lambda: open_store(settings, 0)))
