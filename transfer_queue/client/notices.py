"""Warnings about calls that have nothing to do: a name that does not exist is an empty answer to a program that polls,
and a misspelt one to a person."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transfer_queue.client.shards import QueueEngine
from transfer_queue.control.commands import ListPartitions, Reply, Snapshot, Value
from transfer_queue.control.puts import did_you_mean, name_some
from transfer_queue.errors import RequestError, TransferQueueError, UnknownPartitionError

__all__ = ["Notices", "value_of"]

log = logging.getLogger(__name__)


_OWN = "transfer_queue."
"""Start of the names of partitions that this package makes for itself: a user can do nothing about them."""


class Notices:
    """Warnings of one client. Each is logged once for a call and a name; names that differ in digits count as one, as
    ``train_7`` and ``train_8`` do for a program that asks for each step. There are none about partitions of this
    package's own."""

    def __init__(self, engine: QueueEngine, request_s: float) -> None:
        self._engine = engine
        self._request_s = request_s
        self._said: set[tuple[str, ...]] = set()

    def warn(self, call: str, name: str, text: str) -> None:
        """Log ``text`` as the first one of ``call`` about ``name``."""
        if self._is_first(call, name):
            log.warning("%s: %s", call, text)

    async def absent(self, call: str, partition: str, *, fields: Sequence[str] = (), task: str | None = None) -> None:
        """``call`` found nothing: warn if there is no such partition, field or task. Errors are ignored."""
        if not self._is_first(call, partition, *fields, task or ""):
            return
        try:
            text = await self._missing(partition, fields, task)
        except TransferQueueError:  # the call itself was answered
            return
        if text:
            log.warning("%s: %s", call, text)

    async def hint(self, partition: str) -> str:
        """The partition that an unknown one resembles, as the end of a message; empty if there is none."""
        try:
            names = value_of(await self._engine.request(ListPartitions(""), self._request_s))
        except TransferQueueError:  # the message is right without it
            return ""
        return "" if partition in names else did_you_mean([partition], names)

    def _is_first(self, call: str, name: str, *more: str) -> bool:
        if name.startswith(_OWN):
            return False
        names = (call, name, *more)
        kind = tuple("".join(letter for letter in name if not letter.isdigit()) for name in names)
        first = kind not in self._said
        self._said.add(kind)
        return first

    async def _missing(self, partition: str, fields: Sequence[str], task: str | None) -> str:
        try:
            counts: dict[str, Any] = value_of(await self._engine.request(Snapshot(partition), self._request_s))
        except UnknownPartitionError:
            names = value_of(await self._engine.request(ListPartitions(""), self._request_s))
            found = f"the queue has {name_some(names)}" if names else "the queue has none"
            return f"there is no partition {partition!r} now; {found}{did_you_mean([partition], names)}"
        if unwritten := [name for name in fields if name not in counts["fields"]]:
            names = sorted(counts["fields"])
            hint = did_you_mean(unwritten, names)
            return f"no row of partition {partition!r} has the fields {unwritten}, but {name_some(names)}{hint}"
        if task is not None and task not in counts["tasks"]:
            names = sorted(counts["tasks"])
            found = f"but {name_some(names)}{did_you_mean([task], names)}" if names else "and no other one"
            return f"no task {task!r} has taken rows of partition {partition!r}, {found}"
        return ""


def value_of(reply: Reply) -> Any:
    """What a controller's answer holds. Raises RequestError for an answer of another kind."""
    if not isinstance(reply, Value):
        raise RequestError(f"unexpected answer {type(reply).__name__}")
    return reply.value
