"""Fetches of rows, with warnings about fields that probably are never written."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from transfer_queue.client.notices import Notices, value_of
from transfer_queue.client.shards import QueueEngine
from transfer_queue.control.commands import Batch, Fetch, Snapshot
from transfer_queue.control.puts import did_you_mean
from transfer_queue.errors import TransferQueueError, UnknownPartitionError, WaitTimeoutError

__all__ = ["Fetches"]

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""Time after which a warning names fields that a waiting or polling fetch asks for and no row has."""


class Fetches:
    """Sends the fetches of one client, and warns about those that find nothing for long."""

    def __init__(self, engine: QueueEngine, request_s: float, notices: Notices) -> None:
        self._engine = engine
        self._request_s = request_s
        self._notices = notices
        self._polls: dict[tuple[str, ...], float] = {}
        """(task, partition, *fields) of polls that were empty last -> the time of the first of them."""

    async def fetch(self, fetch: Fetch, *, strict: bool) -> Batch:
        """The rows. Raises what the controller raised, and ConnectionLostError. ``strict``: see ``Engine.fetch``."""
        watch = asyncio.ensure_future(self._watch(fetch)) if fetch.timeout_s > _PATIENCE_S else None
        try:
            batch = await self._engine.fetch(fetch, self._request_s, strict=strict)
            if fetch.timeout_s == 0:
                await self._polled(fetch, batch)
            return batch
        except WaitTimeoutError as error:
            if "the partition does not exist" not in str(error):
                raise
            raise WaitTimeoutError(f"{error}{await self._notices.hint(fetch.partition)}") from None
        finally:
            if watch is not None:
                watch.cancel()

    async def _polled(self, fetch: Fetch, batch: Batch) -> None:
        """Warn once about polls that have found nothing for a while, as ``_watch`` does about a fetch that waits."""
        poll = (fetch.task, fetch.partition, *fetch.fields)
        if batch.indexes:
            self._polls.pop(poll, None)
            return
        now = asyncio.get_running_loop().time()
        if now - self._polls.setdefault(poll, now) < _PATIENCE_S:
            return
        self._polls.clear()  # partitions come and go
        self._polls[poll] = now
        try:
            hindrance = await self.hindrance(fetch.partition, fetch.fields)
        except TransferQueueError:  # the poll itself was answered
            return
        if hindrance:
            self._notices.warn(f"task {fetch.task!r} polls and gets no rows", " ".join(poll[1:]), hindrance)

    async def _watch(self, fetch: Fetch) -> None:
        """Say once what a fetch waits for, and again, at growing intervals, if that is probably never written."""
        waited = 0.0
        while True:
            pause = max(waited, _PATIENCE_S)
            await asyncio.sleep(pause)
            waited += pause
            try:
                counts = await self.counts(fetch.partition)
            except TransferQueueError:
                continue  # the fetch itself says so
            reason = _hindrance(counts, fetch.partition, fetch.fields)
            if not reason and waited == pause:
                reason = _awaited(counts, fetch)
            if reason:
                log.warning("task %r has waited %.0f s for rows: %s", fetch.task, waited, reason)

    async def hindrance(self, partition: str, fields: list[str]) -> str:
        """Return the missing fields that are probably misspelt; empty if the rows have all fields."""
        return _hindrance(await self.counts(partition), partition, fields)

    async def counts(self, partition: str) -> dict[str, Any]:
        """Counts of a partition; empty if there is no such partition."""
        try:
            return dict(value_of(await self._engine.request(Snapshot(partition), self._request_s)))
        except UnknownPartitionError:
            return {}


def _hindrance(counts: dict[str, Any], partition: str, fields: list[str]) -> str:
    if not counts:
        return f"there is no partition {partition!r}"
    unwritten = [name for name in fields if name not in counts["fields"]]
    if not unwritten or not counts["rows"]:
        return ""
    hint = did_you_mean(unwritten, counts["fields"])
    return f"no row of partition {partition!r} has the fields {unwritten}, but {sorted(counts['fields'])}{hint}"


def _awaited(counts: dict[str, Any], fetch: Fetch) -> str:
    """What a fetch waits for that will probably come, in words."""
    rows, taken = counts["rows"], counts["tasks"].get(fetch.task, {}).get("consumed", 0)
    missing = {name: rows - counts["fields"].get(name, 0) for name in fetch.fields}
    lacking = [f"{name!r} is missing on {count} of them" for name, count in missing.items() if count > 0]
    wanted = f"{fetch.batch_size} rows" if fetch.batch_size else "rows"
    parts = [f"it asks for {wanted}, and partition {fetch.partition!r} has {rows}", *lacking]
    if taken:
        parts.append(f"the task has taken {taken} before")
    if not lacking and rows - taken >= fetch.batch_size:
        parts.append("the sampler waits for others with them")
    return ", ".join(parts)
