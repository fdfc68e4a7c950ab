"""The state of a queue as an object that notebooks draw and terminals print."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any, cast

from transfer_queue._printable import printable
from transfer_queue.client.operation import Operation
from transfer_queue.client.shards import QueueEngine, engines_of
from transfer_queue.control.commands import Value
from transfer_queue.runtime.picture import merged
from transfer_queue.runtime.why import explain
from transfer_queue.wire.messages import Look

if TYPE_CHECKING:
    from transfer_queue.control.commands import Command

__all__ = ["QueueStatus", "look"]

_MOST_PARTITIONS, _MOST_FIELDS, _MOST_SENTENCES = 20, 12, 5
_ANSWER_S = 60.0
_TRACK = "background:rgba(128,128,128,.3);border-radius:3px;height:8px;min-width:6em"


class QueueStatus:
    """What a queue holds and who waits, at the moment of the call.

    Attributes:
        queue: Its name.
        rows: Number of rows of all partitions.
        clients: Number of connected clients.
        partitions: A dict for each partition, the oldest first: ``name``, ``rows``, ``bytes``, ``lost``, ``fields``
            (field -> number of rows that have it), ``subscriptions`` (``task``, ``fields``, ``ready``, ``consumed``,
            ``waiting``, in rows) and more.
        waiters: A dict for each waiting request, the longest wait first: ``task``, ``partition``, ``rows``,
            ``waited_s`` (seconds), ``lacks``.
        units: A dict for each storage unit: ``name``, ``address``, ``used`` and ``capacity`` (bytes), ``connected``.
        why: Sentences that say what the requests wait for, as `tq why` prints them.
    """

    def __init__(self, picture: dict[str, Any]) -> None:
        self.queue: str = picture["queue"]
        self.rows: int = picture["rows"]
        self.clients: int = picture["clients"]
        self.partitions: list[dict[str, Any]] = picture["partitions"]
        self.waiters: list[dict[str, Any]] = picture["waiters"]
        self.units: list[dict[str, Any]] = picture["units"]
        self.why: list[str] = explain(picture)

    def _title(self) -> str:
        there = sum(unit["connected"] for unit in self.units)
        units = f"{there} of {len(self.units)} storage units" if self.units else "no storage units"
        counts = ((self.rows, "row"), (len(self.partitions), "partition"), (self.clients, "client"))
        parts = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts]
        return f"{self.queue}: {', '.join([*parts, units])}"

    def _newest(self) -> list[dict[str, Any]]:
        return self.partitions[::-1][:_MOST_PARTITIONS]

    def _more(self) -> Iterator[str]:
        if len(self.partitions) > _MOST_PARTITIONS:
            yield f"and {len(self.partitions) - _MOST_PARTITIONS} older partitions"

    def __repr__(self) -> str:
        lines = [self._title()]
        for item in self._newest():
            fields = ", ".join(f"{name} {ready}/{item['rows']}" for name, ready in _fields(item))
            lost = f", {item['lost']} lost" if item["lost"] else ""
            lines.append(f"  {item['name']}: {item['rows']} rows{lost}; {fields or 'no fields'}")
        lines += [f"  {text}" for text in self._more()]
        return "\n".join(printable(line) for line in [*lines, *self.why[:_MOST_SENTENCES]])

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(item) for item in self._newest())
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in ("partition", "rows", "fields", "tasks"))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        notes = "".join(f"<p>{escape(text)}</p>" for text in self._more())
        why = "".join(f"<li>{escape(text)}</li>" for text in self.why[:_MOST_SENTENCES])
        return f"<p><strong>{escape(self._title())}</strong></p>{table}{notes}<ul>{why}</ul>"


def look(engine: QueueEngine) -> Operation[QueueStatus, QueueStatus]:
    """Ask all controllers of the queue."""

    async def ask() -> QueueStatus:
        message = cast("Command", Look())
        replies = await asyncio.gather(*(one.request(message, _ANSWER_S) for one in engines_of(engine)))
        return QueueStatus(merged([reply.value for reply in replies if isinstance(reply, Value)]))

    return Operation(ask(), lambda found: found)


def _fields(partition: dict[str, Any]) -> list[tuple[str, int]]:
    return list(partition["fields"].items())[:_MOST_FIELDS]


def _html_row(partition: dict[str, Any]) -> str:
    rows = partition["rows"]
    bars = "".join(
        f'<div title="{escape(name)}">{escape(name[:40])} {ready}/{rows}<div style="{_TRACK}">'
        f'<div style="background:{"#2e9e6f" if ready == rows else "#d98324"};border-radius:3px;height:8px;'
        f'width:{100 * ready // max(1, rows)}%"></div></div></div>'
        for name, ready in _fields(partition)
    )
    tasks = "".join(
        f"<div>{escape(each['task'])}: {each['consumed']} consumed, {each['ready']} ready"
        f"{', ' + str(each['waiting']) + ' waiting' if each['waiting'] else ''}</div>"
        for each in partition["subscriptions"][:_MOST_FIELDS]
    )
    lost = f", {partition['lost']} lost" if partition["lost"] else ""
    cells = (escape(partition["name"][:120]), f"{rows}{lost}", bars, tasks)
    return "<tr>" + "".join(f'<td style="text-align:left;vertical-align:top">{cell}</td>' for cell in cells) + "</tr>"
