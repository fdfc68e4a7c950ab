"""A controller's record as a trace that Perfetto and Chrome show: a track per client, arrows from puts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["chrome_trace"]

_MOST_ARROWS = 16
"""From puts to one fetch; more would hide the picture."""
_WAIT_S = 0.001
"""A fetch that took less was answered at once."""


class _Event(NamedTuple):
    kind: str
    client: str
    partition: str
    task: str
    fields: list[str]
    indexes: bytes
    nbytes: int
    start: float
    end: float
    done: bool

    @property
    def rows(self) -> list[int]:
        found: list[int] = np.frombuffer(self.indexes, "<i8").tolist()
        return found


def chrome_trace(record: list[list[Any]], partition: str | None = None) -> dict[str, Any]:
    """``record``: see ``transfer_queue.runtime.tracing``. A fetch lasts from its arrival to its answer; where it waited
    it holds a slice ``wait``, and what the put that ended the wait wrote is in its arguments. A put is where it was
    committed, its transfer lies before; a get is a lookup of rows by key or index. Times in microseconds."""
    events = sorted((_Event(*item) for item in record), key=lambda event: event.start)
    events = [event for event in events if partition in (None, event.partition)]
    first = events[0].start if events else 0.0
    lanes = _Lanes()
    found: list[dict[str, Any]] = []
    put_by: dict[int, int] = {}  # row -> the slice of its newest put
    slices: list[tuple[_Event, dict[str, Any]]] = []
    for event in events:
        drawn = _slice(event, lanes.place(event), first)
        slices.append((event, drawn))
        found.append(drawn)
    arrows = 0
    for number in sorted(range(len(slices)), key=lambda item: (slices[item][0].end, slices[item][0].kind != "put")):
        event, drawn = slices[number]
        if event.kind == "put":
            put_by.update(dict.fromkeys(event.rows, number))
        elif event.kind == "fetch":
            sources = sorted({put_by[row] for row in event.rows if row in put_by}, key=lambda item: slices[item][0].end)
            if event.end - event.start >= _WAIT_S:
                ended_by = slices[sources[-1]][0] if sources else None
                found.append(_wait(drawn, ended_by if ended_by and ended_by.end > event.start else None))
            for source in sources[-_MOST_ARROWS:]:
                arrows += 1
                found += _arrow(arrows, slices[source][1], drawn)
    return {"traceEvents": [*lanes.names(), *found], "displayTimeUnit": "ms"}


class _Lanes:
    """A thread for each client, and more for what one client has under way at the same time."""

    def __init__(self) -> None:
        self._clients: dict[str, list[float]] = {}  # ends of the last slice in each lane
        self._threads: dict[tuple[str, int], int] = {}

    def place(self, event: _Event) -> int:
        ends = self._clients.setdefault(event.client, [])
        lane = next((number for number, end in enumerate(ends) if end <= event.start), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = event.end
        return self._threads.setdefault((event.client, lane), len(self._threads) + 1)

    def names(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "TransferQueue"}}
        for (client, lane), thread in self._threads.items():
            name = client if not lane else f"{client} ({lane + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}


def _slice(event: _Event, thread: int, first: float) -> dict[str, Any]:
    what = ", ".join(event.fields) or "rows"
    name = f"{event.task}: {what}" if event.task else f"{event.kind} {what}"
    arguments = {"partition": event.partition, "rows": len(event.indexes) // 8}
    if event.kind == "put":
        arguments["bytes"] = event.nbytes
    return {
        "ph": "X",
        "name": name if event.done else f"{name} (refused)",
        "cat": event.kind,
        "pid": 1,
        "tid": thread,
        "ts": round((event.start - first) * 1e6, 1),
        "dur": max(1.0, round((event.end - event.start) * 1e6, 1)),
        "args": arguments,
    }


def _wait(fetch: dict[str, Any], ended_by: _Event | None) -> dict[str, Any]:
    arguments = {} if ended_by is None else {"ended by": f"{ended_by.client}: {', '.join(ended_by.fields)}"}
    return {**fetch, "name": "wait", "cat": "wait", "dur": fetch["dur"] - 0.2, "args": arguments}


def _arrow(number: int, source: dict[str, Any], target: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"name": "rows", "cat": "rows", "id": number, "pid": 1}
    end = target["ts"] + target["dur"]
    return [
        {**common, "ph": "s", "tid": source["tid"], "ts": source["ts"]},
        {**common, "ph": "f", "bp": "e", "tid": target["tid"], "ts": max(source["ts"], end - 0.1)},
    ]
