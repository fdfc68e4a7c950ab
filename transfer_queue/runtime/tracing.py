"""A record of what a controller answers, kept only while somebody asks for it."""

from __future__ import annotations

from collections import deque
from typing import Any

from transfer_queue.control.commands import Batch, Clear, Command, Commit, Committed, Fetch, Lookup, Reply

__all__ = ["MOST_EVENTS", "Recorder"]

MOST_EVENTS = 200_000
"""The newest ones are kept."""


class Recorder:
    """``owner``: the connection that asked for it; with it the record ends. Times are the controller's, in seconds."""

    def __init__(self, owner: Any, most: int) -> None:
        self.owner = owner
        self._events: deque[list[Any]] = deque(maxlen=max(1, min(most, MOST_EVENTS)))

    def record(self, client: str, command: Command, reply: Reply | None, start: float, end: float) -> None:
        """A command was answered; ``reply`` None: refused. Only what moves rows is kept."""
        if isinstance(command, Commit):
            indexes = reply.indexes if isinstance(reply, Committed) else b""
            fields = [field.name for field in command.fields]
            nbytes = sum(block.nbytes for block in command.blocks)
            event = ["put", client, command.partition, "", fields, indexes, nbytes]
        elif isinstance(command, Fetch):
            indexes = reply.indexes if isinstance(reply, Batch) else b""
            if reply is not None and not indexes:
                return  # nothing was ready and the client did not want to wait: a poll
            event = ["fetch", client, command.partition, command.task, command.fields, indexes, 0]
        elif isinstance(command, Lookup) and isinstance(reply, Batch) and reply.indexes:
            event = ["get", client, command.partition, "", command.fields or [], reply.indexes, 0]
        elif isinstance(command, Clear):
            event = ["clear", client, command.partition, "", [], command.indexes or b"", 0]
        else:
            return
        self._events.append([*event, start, end, reply is not None])

    def events(self) -> list[list[Any]]:
        """kind, client, partition, task, fields, rows (i64 bytes), bytes put, start, end, whether it was carried out;
        in the order of their ends."""
        return list(self._events)
