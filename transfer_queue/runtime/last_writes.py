"""Which clients wrote each field last: the answer to "who should write what this request waits for?"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transfer_queue.control.commands import Commit

__all__ = ["LastWrite", "LastWrites"]

_MOST_FIELDS, _MOST_CLIENTS = 1024, 64
"""Fields that are remembered, and clients of each: those that wrote last."""
_MOST_TASKS, _MOST_STAGES = 8192, 64
"""Clients whose tasks are remembered, and tasks of each: those that took rows last."""

_PACE_S = 60.0
"""Seconds over which rows are counted. Then time and rows are halved, so that newer puts weigh more."""


class LastWrite(NamedTuple):
    """The newest put of a field by one client. ``at``: seconds of ``time.monotonic``.

    The client wrote ``rows`` rows of the field after ``since``. ``task``: for which it had taken rows; empty: unknown.
    """

    client: str
    partition: str
    at: float
    since: float
    rows: float
    task: str = ""

    def pace(self, now: float) -> float:
        """Rows a second until ``now``; 0.0 after a single put, which is too little to tell."""
        return self.rows / (now - self.since) if now > self.since else 0.0

    def again(self, partition: str, at: float, rows: int, task: str) -> LastWrite:
        """The next put of the client."""
        halves = 0.5 if self.at - self.since > _PACE_S else 1.0
        return LastWrite(
            self.client, partition, at, self.at - halves * (self.at - self.since), halves * self.rows + rows, task
        )


class LastWrites:
    """The newest puts of each field name, one for each client, over all partitions."""

    def __init__(self) -> None:
        self._by_field: dict[str, dict[str, LastWrite]] = {}
        self._tasks_of: dict[str, dict[str, tuple[str, ...]]] = {}
        """Client -> its tasks, the newest to take rows at the end -> the fields of these rows; empty: no rows yet."""
        self.connected: frozenset[str] = frozenset()
        """Clients that were connected at ``connected_at``, of the controller's clock."""
        self.connected_at = float("-inf")
        self.missing: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
        """Partition, fields -> the rows that lacked each of these fields at ``missing_at``."""
        self.missing_at = float("-inf")

    def note(self, client: str, command: Commit, at: float, rows: int = 0) -> None:
        """Remember a put of ``rows`` rows that was accepted."""
        if not command.fields:
            return
        for schema in command.fields:
            task = self._stage(client, schema.name)
            writes = self._by_field.pop(schema.name, None) or {}
            self._by_field[schema.name] = writes  # the newest is last
            former = writes.pop(client, None)
            if former is None:
                writes[client] = LastWrite(client, command.partition, at, at, 0.0, task)
            else:
                writes[client] = former.again(command.partition, at, rows, task)
            if len(writes) > _MOST_CLIENTS:
                del writes[next(iter(writes))]
        while len(self._by_field) > _MOST_FIELDS:
            del self._by_field[next(iter(self._by_field))]

    def of(self, field: str) -> LastWrite | None:
        """The newest put of ``field``; None: none is remembered."""
        writes = self._by_field.get(field)
        return next(reversed(writes.values())) if writes else None

    def all_of(self, field: str) -> list[LastWrite]:
        """The newest put of ``field`` by each client, the oldest first."""
        return list(self._by_field.get(field, {}).values())

    def producer_of(self, field: str, client: str) -> str:
        """The stage that writes a field: the task of ``client``, else its name if no other client writes the field."""
        writes = self._by_field.get(field, {})
        if task := self.task_of(client) or (writes[client].task if client in writes else ""):
            return task
        return "several clients" if len(writes) > 1 else client

    def fetches(self, client: str, task: str) -> None:
        """A client asks for rows for a task: if this is its only task, it is the stage whose results it writes."""
        tasks = self._tasks_of.get(client)
        if tasks is None:
            self._tasks_of[client] = {task: ()}
            if len(self._tasks_of) > _MOST_TASKS:
                del self._tasks_of[next(iter(self._tasks_of))]
        elif task not in tasks:
            self._tasks_of[client] = {task: (), **tasks}

    def takes(self, client: str, task: str, fields: Sequence[str]) -> None:
        """A client has the rows that it asked for: of several stages, it writes the results of this one next."""
        tasks = self._tasks_of.get(client)
        if tasks is not None:
            tasks.pop(task, None)
            tasks[task] = tuple(fields)
            if len(tasks) > _MOST_STAGES:
                del tasks[next(iter(tasks))]

    def task_of(self, client: str) -> str:
        """The only task for which a client has fetched; empty: there are several, or none is remembered."""
        tasks = self._tasks_of.get(client, {})
        return next(iter(tasks)) if len(tasks) == 1 else ""

    def _stage(self, client: str, field: str) -> str:
        """The task for which a client took rows last, among those that do not ask for ``field`` themselves."""
        tasks = self._tasks_of.get(client, {})
        return next((task for task in reversed(tasks) if tasks[task] and field not in tasks[task]), "")
