"""Long answers are made in slices, so that other requests are served in between.

They show each row or partition at some moment between the request and the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.control.commands import (
    Command,
    ConsumptionStatus,
    KeysOf,
    ListKeys,
    Lookup,
    ProductionStatus,
    Snapshot,
    Value,
)
from transfer_queue.control.partition import Partition
from transfer_queue.control.queries import (
    count_rows,
    keys_of_in_parts,
    lookup_in_parts,
    status_in_parts,
    tagged_keys_in_parts,
)
from transfer_queue.control.requests import USERS
from transfer_queue.errors import RequestError, TransferQueueError
from transfer_queue.runtime.batch_parts import BatchParts, RegroupedError, joined_status, msgpack_head, without_head
from transfer_queue.runtime.picture import partition_pictures, picture
from transfer_queue.runtime.why import explain
from transfer_queue.wire.messages import ENCODER, Look

if TYPE_CHECKING:
    from transfer_queue.runtime.access import Principal
    from transfer_queue.runtime.connection import Connection
    from transfer_queue.runtime.controller import Controller

__all__ = ["LongAnswers", "Slices"]

log = logging.getLogger(__name__)

_SLICE_S = 0.002
_MANY_KEYS, _MANY_PARTITIONS, _MANY_ROWS = 2000, 100, 8000
"""Number of items up to which an answer is made at once."""
_OWED = 4 << 20
"""Estimated bytes of an answer in progress."""
_VALUE = ENCODER.encode(Value(msgspec.Raw(b"")))
"""All of a Value but what it holds, which comes last."""


class Slices:
    """Cuts work into slices of 2 ms."""

    def __init__(self) -> None:
        self._until = perf_counter() + _SLICE_S

    async def turn(self) -> None:
        """Let other requests run if the slice is used up."""
        if perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + _SLICE_S

    async def collect(self, items: Iterable[bytes]) -> list[bytes]:
        """``list(items)``."""
        found: list[bytes] = []
        for item in items:
            found.append(item)
            await self.turn()
        return found


class LongAnswers:
    """Makes long answers, one at a time for the whole controller, so that they do not add up."""

    def __init__(self, controller: Controller, after: Callable[..., None]) -> None:
        """``after`` calls a function once what was changed before is in the journal."""
        self._controller = controller
        self._after = after
        self._making = asyncio.Lock()
        self.lost_rows = 0
        """Rows of all partitions that lost a field, as of the last `count_lost`."""

    def is_long(self, body: Any) -> bool:
        """Whether the answer to this request is long; otherwise its time is negligible."""
        partitions = self._controller.core.state.partitions
        if isinstance(body, ListKeys):
            if body.partition:
                found = partitions.get(body.partition)
                return found is not None and len(found.keys) > _MANY_KEYS
            return (
                len(partitions) > _MANY_PARTITIONS or sum(len(item.keys) for item in partitions.values()) > _MANY_KEYS
            )
        if isinstance(body, KeysOf):
            return len(body.indexes) > 8 * _MANY_ROWS
        if isinstance(body, ProductionStatus | ConsumptionStatus):
            found = partitions.get(body.partition)
            return found is not None and found.rows > _MANY_ROWS
        if isinstance(body, Lookup):
            if body.keys is not None or body.indexes is not None:
                return len(body.keys or ()) > _MANY_ROWS or len(body.indexes or b"") > 8 * _MANY_ROWS
            found = partitions.get(body.partition)
            return found is not None and found.rows > _MANY_ROWS
        if isinstance(body, Look) or (isinstance(body, Snapshot) and not body.partition):
            return len(partitions) > _MANY_PARTITIONS
        return False

    def serve(self, connection: Connection, request: int, body: Any) -> Coroutine[Any, Any, None]:
        """Count the answer as unsent from now on, and return the work that sends it."""
        connection.owe(_OWED)
        return self._serve(connection, request, body)

    async def _serve(self, connection: Connection, request: int, body: Any) -> None:
        started, failed = perf_counter(), True
        try:
            async with connection.context.long_answers:
                await connection.room()  # the client reads its earlier answers first
                if not connection.closed:
                    parts = await self._parts(body, connection.principal)
                    self._after(connection.reply_parts, request, parts)
            failed = False
        except TransferQueueError as error:
            self._after(connection.fail, request, error)
        except MemoryError:
            raise  # ends the process
        except Exception as error:  # boundary of a request
            log.exception("request %s failed", type(body).__name__)
            self._after(connection.fail, request, RequestError(f"{type(error).__name__} in the controller: {error}"))
        finally:
            connection.owe(-_OWED)
            self._controller.counters.requests.count(type(body), perf_counter() - started, failed)

    async def _parts(self, body: Any, principal: Principal | None) -> list[bytes]:
        if isinstance(body, Lookup):
            return await self.batch(body)
        if isinstance(body, ProductionStatus | ConsumptionStatus):
            return await self.status(body)
        return [_VALUE, *await self.value(body, lambda name: principal is None or principal.may(USERS, name))]

    async def value(self, body: Command | Look, may: Callable[[str], bool]) -> list[bytes]:
        """The value of the answer in msgpack, in parts. ``may``: whether the client may see a partition."""
        async with self._making:
            if isinstance(body, Look):
                head = picture(self._controller, partitions=False)
                parts = await Slices().collect(map(ENCODER.encode, partition_pictures(self._controller)))
                return [ENCODER.encode(head)[:-1], msgpack_head(len(parts), 0x90), *parts]
            if isinstance(body, KeysOf):
                listed = await Slices().collect(self._keys_of(body))
                return [msgpack_head(len(body.indexes) // 8, 0x90), *listed]
            names = [name for name in self._controller.core.state.partitions if may(name)]
            if isinstance(body, Snapshot):
                parts = await Slices().collect(self._counts(names))
                whole = self._controller.core.totals()
                return [msgpack_head(len(whole) + 1, 0x80), ENCODER.encode(whole)[1:], ENCODER.encode("partitions"),
                        msgpack_head(len(parts), 0x80), *parts]  # fmt: skip
            if body.partition:
                names = [body.partition]
            return await self._keys(names)

    async def batch(self, lookup: Lookup) -> list[bytes]:
        """The answer to a lookup in msgpack, in parts. Raises what the core raises."""
        async with self._making:
            slices = Slices()
            while True:
                found = BatchParts()
                try:
                    for part in lookup_in_parts(self._controller.core.state.partitions, lookup):
                        if part is not None:
                            found.add(part)
                        await slices.turn()
                except RegroupedError:  # by a put of other fields, which is rare
                    continue
                return found.encoded(lookup.fields)

    async def status(self, command: ProductionStatus | ConsumptionStatus) -> list[bytes]:
        """The answer in msgpack, in parts."""
        async with self._making:
            slices, parts = Slices(), []
            for part in status_in_parts(self._controller.core.state.partitions, command):
                parts.append(part)
                await slices.turn()
            return joined_status(parts)

    async def bury(self, partition: Partition) -> None:
        """Take apart a partition that is no part of the core any more: to free a million keys takes its time."""
        slices = Slices()
        while partition.keys.drop(1000):
            await slices.turn()
        for values in (partition.tags, partition.key_of or []):
            while values:
                del values[-1000:]
                await slices.turn()

    async def json(self) -> list[bytes]:
        """The picture as JSON, in parts."""
        async with self._making:
            head = picture(self._controller, partitions=False)
            head = {"why": explain(head), **head}
            parts = await Slices().collect(
                msgspec.json.encode(item) + b"," for item in partition_pictures(self._controller)
            )
        if parts:
            parts[-1] = parts[-1][:-1]
        return [msgspec.json.encode(head)[:-2], *parts, b"]}"]

    async def count_lost(self) -> None:
        """Update ``lost_rows``."""
        core = self._controller.core
        async with self._making:
            lost, slices = 0, Slices()
            for name in list(core.state.partitions):
                if (partition := core.state.partitions.get(name)) is not None:
                    lost += partition.count_lost()
                    await slices.turn()
            self.lost_rows = lost

    def _counts(self, names: list[str]) -> Iterator[bytes]:
        core = self._controller.core
        for name in names:
            if (partition := core.state.partitions.get(name)) is not None:
                counts = count_rows(partition, core.wait_queue.waiting_for(name))
                yield ENCODER.encode(name) + ENCODER.encode(counts)

    def _keys_of(self, command: KeysOf) -> Iterator[bytes]:
        for keys in keys_of_in_parts(self._controller.core.state.partitions, command):
            yield without_head(keys)

    async def _keys(self, names: list[str]) -> list[bytes]:
        found: list[bytes] = []
        listed, slices = 0, Slices()
        for name in names:
            partition = self._controller.core.state.partitions.get(name)
            if partition is None:
                continue
            place, count = len(found), 0
            found.append(b"")
            for part in tagged_keys_in_parts(partition):
                count += len(part)
                found.append(without_head(part))
                await slices.turn()
            found[place] = ENCODER.encode(name) + msgpack_head(count, 0x80)
            listed += 1
        return [msgpack_head(listed, 0x80), *found]
