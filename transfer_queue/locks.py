"""``kv_global_lock`` and ``kv_update``: what clients do one after the other, wherever they run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from transfer_queue._kv_meta import KVBatchMeta
from transfer_queue.client.client import AsyncClient
from transfer_queue.client.local_locks import Held, async_lock_block, check_lock, lock_block
from transfer_queue.client.locks import GlobalLock, giving_back, taking
from transfer_queue.client.twins import blocking
from transfer_queue.client.updates import Parser, Update
from transfer_queue.errors import RowChangedError, StorageKeyNotFoundError
from transfer_queue.lifecycle import current_client

__all__ = ["GlobalLock", "async_kv_global_lock", "async_kv_update", "kv_global_lock", "kv_update"]

_held = Held("kv_global_lock")
_LEASE_S = 30.0


async def _async_take(
    client: AsyncClient, keys: list[str], partition_id: str, timeout: float | None, lease_s: float
) -> GlobalLock:
    return await client.async_run(taking, client.engine, keys, partition_id, timeout, lease_s)


async def _async_give_back(client: AsyncClient, lock: GlobalLock) -> None:
    await client.async_run(giving_back, lock)


_take, _give_back = blocking(_async_take), blocking(_async_give_back)


@lock_block
def kv_global_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None, lease_s: float = 30
) -> Iterator[GlobalLock]:
    """Hold an exclusive lock on ``keys`` among all clients of the queue, first come, first served.

    The lock is renewed while the block runs. It ends at the end of the block, with the client's connection, or
    ``lease_s`` seconds after the last renewal, so that a process that is killed or hangs does not keep it. A holder
    that was held up may find out late that its lock has ended: puts with ``lock=`` are then refused. Requests wait at
    the controller, which answers when the lock is free. Other calls of the key-value interface do not look at locks.

    Args:
        keys: One or more names. They need not be keys of rows. All of them are taken at once.
        partition_id: The partition of these names.
        timeout: Seconds to wait for the lock. None: no limit.
        lease_s: Seconds for which the lock outlives its last renewal.

    Yields:
        GlobalLock: Its ``fence`` has a number for each key, which grows with each lock; ``check()`` raises once the
        lock has ended.

    Raises:
        WaitTimeoutError: A TimeoutError: not all keys were free in time; the message names who is ahead.
        LockLostError: A RuntimeError: the lock ended within the block, which itself raised nothing.
        RequestError: A RuntimeError: this thread or task holds a global lock already, or an event loop runs in it.
        ConnectionLostError: The controller of the partition cannot be reached.
        InvalidInputError, InvalidTypeError: An argument is wrong.

    Example:
        >>> with tq.kv_global_lock("counter", "train", timeout=10) as lock:
        ...     count = tq.kv_batch_get("counter", "train")["n"][0]
        ...     meta = tq.kv_put("counter", "train", {"n": count + 1}, lock=lock)
    """
    names, client = check_lock(keys, partition_id, timeout, blocks="kv_global_lock"), current_client()
    with _held.block():
        lock, owner = _take(client, names, partition_id, timeout, lease_s), os.getpid()
        try:
            yield lock
            lock.check()
        finally:
            if os.getpid() == owner:  # a forked child that leaves the block has no lock
                _give_back(client, lock)


@async_lock_block
async def async_kv_global_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None, lease_s: float = 30
) -> AsyncIterator[GlobalLock]:
    """See ``kv_global_lock``."""
    names, client = check_lock(keys, partition_id, timeout), current_client()
    with _held.block():
        lock = await _async_take(client, names, partition_id, timeout, lease_s)
        try:
            yield lock
            lock.check()
        finally:
            await _async_give_back(client, lock)


async def async_kv_update(
    key: str, partition_id: str, fields: str | list[str], values: Any = None, parser: Parser | None = None
) -> KVBatchMeta:
    """Set fields of one row to ``parser(old, new)``, atomically. Only these fields are read and written.

    No other put of these fields comes between: if one does, the new values are read and ``parser`` is called again. It
    runs in this process.

    Args:
        key: The key of a row that exists.
        partition_id: Its partition.
        fields: One field, or a list of them.
        values: What ``parser`` gets as ``new``: the value of the one field, or a mapping with one for each field.
        parser: Gets what the row has (None if it lacks the field) and the new value, and returns what to store: a
            tensor of one row, or any other value but None. It may be called more than once.

    Returns:
        The key with its tag, and the sorted names of the fields that are ready.

    Raises:
        KeyNotFoundError: A ValueError: there is no such row.
        InvalidInputError, InvalidTypeError: An argument is wrong. What ``parser`` raises. Then nothing changed.

    Example:
        >>> meta = await tq.async_kv_put("a", "train", {"ids": torch.tensor([1, 2])})
        >>> meta = await tq.async_kv_update("a", "train", "ids", torch.tensor([3]), lambda *pair: torch.cat(pair))
        >>> row = await tq.async_kv_batch_get("a", "train")
        >>> row["ids"][0]
        tensor([1, 2, 3])
    """
    update, client = Update(key, partition_id, fields, values, parser), current_client()

    async def attempt() -> KVBatchMeta | None:
        """None: somebody wrote the fields meanwhile."""
        try:
            cells = await client.async_run(client.kv.read_cells, key, partition_id, update.names)
        except StorageKeyNotFoundError:
            return None
        changed = update.changed(cells)  # what the user's parser raises is for the caller
        try:
            return await client.async_run(client.kv.write_cells, key, partition_id, changed, cells.blocks)
        except (RowChangedError, StorageKeyNotFoundError):
            return None

    if done := await attempt():
        return done
    lock = await _async_take(client, [update.line], partition_id, None, _LEASE_S)
    try:
        while True:
            if done := await attempt():
                return done
    finally:
        await _async_give_back(client, lock)


kv_update = blocking(async_kv_update)


def _renew_in_child() -> None:
    global _held
    _held = Held("kv_global_lock")  # the lock that was held at the fork is the parent's


os.register_at_fork(after_in_child=_renew_in_child)
