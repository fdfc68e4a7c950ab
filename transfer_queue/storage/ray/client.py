"""Client side of the Ray backend: blocks are objects of an actor of their unit, their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
)

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.column import Bytes
from transfer_queue.config.document import validate_document
from transfer_queue.errors import CapacityError, ConnectionLostError, StorageKeyNotFoundError, WaitTimeoutError
from transfer_queue.storage.base import (
    Backend,
    BackendContext,
    BlockRead,
    Capabilities,
    Fetched,
    FetchedBlock,
    UnitInfo,
)
from transfer_queue.storage.ray.cluster import RayStoreSettings, answer, connect, first_line
from transfer_queue.storage.ray.transports import may_put, put_value, value_of

__all__ = ["RayBackend", "open_backend"]

_ANSWER_S = 30.0
_SLOWEST_BYTES_PER_S = 50e6
_INLINE_BYTES = 64 << 10
"""Smaller blocks are kept by the owner itself: an object of its own would cost more than its bytes."""


class _Fetched(Fetched):
    """Views of objects in the store; the values keep them there."""

    def __init__(self, blocks: list[FetchedBlock]) -> None:
        self.blocks = blocks

    def release(self) -> None:
        self.blocks = []


class RayBackend(Backend):
    """See ``storage.base.Backend``."""

    name = "ray"
    capabilities = Capabilities()

    def __init__(self, context: BackendContext, settings: RayStoreSettings) -> None:
        self._context = context
        self._settings = settings
        self._owners: dict[str, Any] = {}
        self._closed = False

    async def put(self, block: EncodedBlock, block_id: int, unit: UnitInfo, *, wait_s: float) -> int:
        nbytes = block.nbytes
        if nbytes > unit.capacity:
            raise CapacityError(
                f"storage unit {unit.name} has no capacity for {nbytes} bytes: its capacity is {unit.capacity}; put "
                "smaller batches"
            )
        timeout_s = wait_s + _ANSWER_S
        with _explained(unit):
            owner = await self._owner(unit)
            try:
                if nbytes <= _INLINE_BYTES:
                    kept = await answer(owner.keep.remote(block_id, nbytes, bytes(block.to_bytes()), wait_s), timeout_s)
                else:
                    kept = await answer(owner.reserve.remote(block_id, nbytes, wait_s), timeout_s)
                    if kept:
                        content = await asyncio.to_thread(self._content, block)  # it may wait for others
                        sent = await self._context.run_copy(lambda: owner.keep.remote(block_id, nbytes, content, 0.0))
                        kept = await answer(sent, _ANSWER_S + nbytes / _SLOWEST_BYTES_PER_S)
            except BaseException:
                owner.free.remote([block_id])
                raise
        if not kept:
            raise CapacityError(
                f"storage unit {unit.name} has no capacity left for a block of {nbytes} bytes, and none became free "
                f"within {wait_s:g} s; clear consumed rows or raise the capacity of the units"
            )
        return nbytes

    async def get(self, reads: Sequence[BlockRead], *, timeout_s: float) -> _Fetched:
        deadline = asyncio.get_running_loop().time() + timeout_s
        by_unit: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_unit.setdefault(read.unit.unit, []).append(position)
        blocks: list[FetchedBlock] = [None] * len(reads)  # type: ignore[list-item]
        await asyncio.gather(*(self._get_from(reads, where, blocks, deadline) for where in by_unit.values()))
        return _Fetched(blocks)

    async def _get_from(
        self, reads: Sequence[BlockRead], positions: list[int], blocks: list[FetchedBlock], deadline: float
    ) -> None:
        loop = asyncio.get_running_loop()
        unit = reads[positions[0]].unit
        with _explained(unit):
            owner = await self._owner(unit)
            asked = [reads[position].block for position in positions]
            contents = await answer(owner.contents.remote(asked), max(0.001, deadline - loop.time()))
            gone = [block for block, content in zip(asked, contents, strict=True) if content is None]
            if gone:
                raise StorageKeyNotFoundError(f"blocks {gone} are gone from storage unit {unit.name}: cleared")
            for position, content in zip(positions, contents, strict=True):
                if not isinstance(content, bytes):
                    content = await self._value(content[0], max(0.001, deadline - loop.time()))
                blocks[position] = FetchedBlock(BlockView(content), reads[position].rows)

    def _content(self, block: EncodedBlock) -> Any:
        """The block for its owner to take over: by the transport where this process may use it."""
        array, transport = _array(block), self._settings.transport
        return [put_value(array, transport)] if may_put(transport) else array

    async def _value(self, reference: Any, timeout_s: float) -> Bytes:
        if self._settings.transport == "object_store":
            value: Bytes = await answer(reference, timeout_s)
            return value
        try:
            return await asyncio.to_thread(value_of, reference, timeout_s)
        except GetTimeoutError:
            raise WaitTimeoutError(f"Ray did not answer within {timeout_s:g} s") from None

    async def discard(self, block_id: int, unit: UnitInfo) -> None:
        if self._closed:
            return
        with _explained(unit):
            (await self._owner(unit)).free.remote([block_id])

    async def close(self) -> None:
        self._closed = True
        self._owners = {}

    async def _owner(self, unit: UnitInfo) -> Any:
        if self._closed:
            raise ConnectionLostError("the connection to the storage units is closed")
        name = unit.attributes["owner"]
        owner = self._owners.get(name)
        if owner is None:
            try:
                owner = await self._context.run_copy(lambda: ray.get_actor(name, unit.attributes["namespace"]))
            except ValueError:
                raise ConnectionLostError(
                    f"storage unit {unit.name} cannot be reached: there is no actor {name} in the Ray cluster"
                ) from None
            self._owners[name] = owner
        return owner


def _array(block: EncodedBlock) -> Bytes:
    memory = np.empty(block.nbytes, np.uint8)
    block.write_into(memory)
    return memory


@contextmanager
def _explained(unit: UnitInfo) -> Iterator[None]:
    """Ray's errors as the library's."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise CapacityError(
            "Ray's object store has no capacity left on this node; raise object_store_memory of `ray start`, or lower "
            f"the capacity of the storage units: {first_line(error)}"
        ) from None
    except (ObjectLostError, ObjectFetchTimedOutError) as error:
        raise StorageKeyNotFoundError(
            f"a block of storage unit {unit.name} was lost from Ray's object store ({type(error).__name__}); put its "
            f"rows again: {first_line(error)}"
        ) from None
    except RayActorError as error:
        raise ConnectionLostError(
            f"storage unit {unit.name} cannot be reached: the actor that owns its blocks is gone: {first_line(error)}"
        ) from None
    except RayError as error:
        raise ConnectionLostError(f"storage unit {unit.name} cannot be used: {first_line(error)}") from None


async def open_backend(context: BackendContext) -> RayBackend:
    """Raises ConfigError."""
    settings = validate_document(RayStoreSettings, context.settings, "backend ray")
    await context.run_copy(lambda: connect(settings))
    return RayBackend(context, settings)
