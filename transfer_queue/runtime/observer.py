"""Keeps a controller's `History`: counts what it answers, and once a second looks at what waits.

The cost of a second does not grow with the number of partitions: only those with traffic and those that already have
series are looked at, and the search for the fields that requests lack ends after 2 ms and goes on a second later.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from transfer_queue.control.commands import Batch, Command, Commit, Committed, Fetch, Lookup, Reply
from transfer_queue.control.wait_queue import Waiter
from transfer_queue.runtime.history import Gauge, History, Rate
from transfer_queue.runtime.ready_rows import ReadyRows
from transfer_queue.runtime.timeline import Event, Timeline

if TYPE_CHECKING:
    from transfer_queue.control.partition import Partition
    from transfer_queue.runtime.controller import Controller

__all__ = ["Observer"]

_FLOW = (Rate("rows_in"), Rate("bytes_in"), Rate("rows_out"), Rate("bytes_out"))
_STATE = (Gauge("ready"), Gauge("waiting_rows"), Rate("waited"), Gauge("age"))
_GROUPS: dict[str, tuple[tuple[Gauge | Rate, ...], int]] = {
    "queue": (
        (*_FLOW, *_STATE, Gauge("rows"), Gauge("clients"), Gauge("oldest_wait"), Gauge("fill"), Gauge("fullest")),
        1,
    ),
    "partitions": ((*_FLOW, *_STATE, Gauge("rows")), 16),
    "tasks": ((Rate("rows_out"), Rate("bytes_out"), *_STATE), 12),
    "reasons": ((Rate("waited"),), 16),
}
_MOST_FLOWS = 1024
"""Partitions, tasks and reasons that are counted within one second, each."""
_MOST_WAITERS = 500
"""Waiting requests that are looked at once a second."""
_LOOK_S = 0.002
_MOST_BIRTHS = 128
_POINTS = 100
_SPANS_S = (60, 86400)
_MOST_ANSWERS = 64
"""Of one second that are kept, about 60 kB each."""
_WAIT_ACTIVITY = 1000.0
"""Rows that a request which waits a second counts for when partitions compete for room."""
_JSON = msgspec.json.Encoder(decimal_format="number")


K = TypeVar("K")


class _Flow:
    """What moved within this second. ``age``: of the oldest row that was taken, in seconds; NaN: none was."""

    __slots__ = ("age", "bytes_in", "bytes_out", "ready", "rows_in", "rows_out", "waited", "wanted")

    def __init__(self) -> None:
        self.rows_in = self.bytes_in = self.rows_out = self.bytes_out = self.wanted = self.ready = 0
        self.waited = 0.0
        self.age = np.nan

    def took(self, rows: int, nbytes: int, age: float) -> None:
        self.rows_out += rows
        self.bytes_out += nbytes
        if not age <= self.age:  # either may be NaN
            self.age = self.age if age != age else age

    @property
    def activity(self) -> float:
        return self.rows_in + self.rows_out + _WAIT_ACTIVITY * self.waited

    def rates(self, seconds: float) -> tuple[float, ...]:
        """Values of ``_FLOW``."""
        return self.rows_in / seconds, self.bytes_in / seconds, self.rows_out / seconds, self.bytes_out / seconds

    def state(self, seconds: float) -> tuple[float, ...]:
        """Values of ``_STATE``."""
        return self.ready, self.wanted, self.waited / seconds, self.age


class _Reason(NamedTuple):
    """``kind``: field, rows (none are left to take), or partition (it does not exist). ``producer``: the task for which
    the writer of the field fetches rows itself, else its name."""

    kind: str
    field: str = ""
    producer: str = ""


class Observer:
    """Begins with `start`; ``sample`` is called once a second from then on.

    A wait is counted in the seconds in which it passed, also where it is shorter than a second. It is the fault of the
    field that is missing on most rows and of the client that wrote this field last; for a request that has been
    answered, of the put that completed its batch.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._began = self._sampled = monotonic()
        self.history = History(_GROUPS, self._began)
        self.timeline = Timeline(self._stage)
        self._ready = ReadyRows()
        self._partitions: dict[str, _Flow] = {}
        self._tasks: dict[str, _Flow] = {}
        self._reasons: dict[_Reason, float] = {}
        self._whole = _Flow()
        self._fetched: dict[tuple[str, str], _Flow] = {}
        """Partition, task -> what was taken; added to the others once a second."""
        self._births: dict[str, tuple[list[int], list[float]]] = {}  # of partitions with series: ordinals, times
        self._lacks: dict[Any, _Reason] = {}  # what each waiting subscription lacked when it was looked at last
        self._last_put: tuple[str, Commit, bytes] | None = None
        self._answers: dict[tuple[float, str], bytes] = {}  # to the pages that ask until the next sample
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(1.0, self.start, loop)
        if monotonic() - self._sampled >= 0.5:
            self.sample(monotonic())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------------------------------------------- events

    def answered(self, client: str, command: Command, reply: Reply | None, since: float, now: float) -> None:
        """A command was carried out. ``since``, ``now``: of ``time.monotonic``."""
        if isinstance(reply, Committed) and isinstance(command, Commit):
            rows, nbytes = len(reply.indexes) // 8, 0
            self.timeline.put(client, command.partition, command.fields, rows, since, now)
            for block in command.blocks:
                nbytes += block.nbytes
            for flow in (self._whole, self._flow(self._partitions, command.partition)):
                if flow is not None:
                    flow.rows_in += rows
                    flow.bytes_in += nbytes
            self._last_put = (client, command, reply.indexes)
        elif isinstance(reply, Batch) and reply.indexes:
            rows = len(reply.indexes) // 8
            if isinstance(command, Fetch):
                self._took(command, reply, now)
                self.timeline.get(command.task, client, command.partition, command.fields, rows, since, now)
            elif isinstance(command, Lookup):
                fields = command.fields or []
                self.timeline.get("", client, command.partition, fields, rows, since, now)

    def waited(self, client: str, command: Command, reply: Reply | None, since: float, now: float) -> None:
        """A parked command was answered or given up."""
        if isinstance(command, Fetch):
            rows = len(reply.indexes) // 8 if isinstance(reply, Batch) else 0
            completed = self._completed_by(command, reply)
            reason = completed or self._lacks.get(_key(command), _Reason("rows"))
            self._wait(command.partition, command.task, reason, now - max(since, self._sampled))
            self.timeline.wait(
                command.task, client, command.partition, command.fields, rows, since, now, completed is not None
            )
            since = now
        self.answered(client, command, reply, since, now)

    def _completed_by(self, command: Fetch, reply: Reply | None) -> _Reason | None:
        """The newest put, if rows of it are in the batch."""
        if isinstance(reply, Batch) and self._last_put is not None:
            client, put, indexes = self._last_put
            if put.partition == command.partition and _overlap(indexes, reply.indexes):
                field = next((field.name for field in put.fields if field.name in command.fields), None)
                if field is None:
                    return _Reason("rows", "", self._stage(client))
                return _Reason("field", field, self._controller.last_writes.producer_of(field, client))
        return None

    def _took(self, command: Fetch, reply: Batch, now: float) -> None:
        flow = self._flow(self._fetched, (command.partition, command.task))
        if flow is None:
            self._add_fetched()
            self._took(command, reply, now)
            return
        rows, nbytes, age = len(reply.indexes) // 8, 0, np.nan
        partition = self._controller.core.state.partitions.get(command.partition)
        if partition is not None:
            nbytes = rows * partition.nbytes // max(1, partition.rows)
            age = self._age(partition, int.from_bytes(reply.indexes[:8], "little", signed=True), now)
        flow.took(rows, nbytes, age)

    def _age(self, partition: Partition, index: int, now: float) -> float:
        births = self._births.get(partition.name)
        if births is None:
            return np.nan
        ordinals, times = births
        place = bisect_right(ordinals, partition.indexes.ordinal(index))
        return 0.0 if place == len(ordinals) else now - times[place]

    def _add_fetched(self) -> None:
        for (partition, task), taken in self._fetched.items():
            for flow in (self._whole, self._flow(self._partitions, partition), self._flow(self._tasks, task)):
                if flow is not None:
                    flow.took(taken.rows_out, taken.bytes_out, taken.age)
        self._fetched = {}

    def _wait(self, partition: str, task: str, reason: _Reason, seconds: float) -> None:
        for flow in (self._whole, self._flow(self._partitions, partition), self._flow(self._tasks, task)):
            if flow is not None:
                flow.waited += seconds
        if reason in self._reasons or len(self._reasons) < _MOST_FLOWS:
            self._reasons[reason] = self._reasons.get(reason, 0.0) + seconds

    @staticmethod
    def _flow(flows: dict[K, _Flow], key: K) -> _Flow | None:
        flow = flows.get(key)
        if flow is None and len(flows) < _MOST_FLOWS:
            flow = flows[key] = _Flow()
        return flow

    # ----------------------------------------------------------------------------------------------------- a second

    def sample(self, now: float) -> None:
        """Keep what happened since the last sample. ``now``: of ``time.monotonic``."""
        core, history = self._controller.core, self.history
        self._add_fetched()
        oldest = self._look_at_waiters(now)
        tracked = list(history.admit("partitions", {key: flow.activity for key, flow in self._partitions.items()}))
        values: dict[str, dict[Any, tuple[float, ...]]] = {"partitions": {}}
        seconds = max(1e-3, now - self._sampled)
        self._births = {name: self._births.get(name) or ([], []) for name in tracked if name in core.state.partitions}
        for name in tracked:
            partition, flow = core.state.partitions.get(name), self._partitions.get(name)
            if partition is None and flow is None:
                continue  # it is gone, and so will its series be when another one needs their room
            flow = flow or _Flow()
            if partition is not None:
                self._look_at(partition, flow, now)
            rows = 0 if partition is None else partition.rows
            values["partitions"][name] = (*flow.rates(seconds), *flow.state(seconds), rows)
        self._ready.look_around(core.state.partitions, self._partitions, _LOOK_S)
        self._whole.ready = self._ready.whole
        for task, ready in islice(self._ready.by_task.items(), _MOST_FLOWS):
            if (of_task := self._flow(self._tasks, task)) is not None:
                of_task.ready = ready
        admitted = history.admit("tasks", {key: flow.activity + flow.ready for key, flow in self._tasks.items()})
        nothing = _Flow()
        values["tasks"] = {
            name: (*flow.rates(seconds)[2:], *flow.state(seconds))
            for name in admitted
            for flow in [self._tasks.get(name, nothing)]
        }
        reasons = history.admit("reasons", self._reasons)
        values["reasons"] = {name: (self._reasons.get(name, 0.0) / seconds,) for name in reasons}
        history.admit("queue", {"": 1.0})
        whole = self._whole
        levels = core.state.rows, self._controller.clients_connected, oldest, *self._fill()
        values["queue"] = {"": (*whole.rates(seconds), *whole.state(seconds), *levels)}
        history.record(now, values)
        self._partitions, self._tasks, self._reasons, self._whole = {}, {}, {}, _Flow()
        self._sampled = now
        self._answers.clear()

    def _look_at(self, partition: Partition, flow: _Flow, now: float) -> None:
        """Its ready rows, and how many rows it has had by now."""
        flow.ready = self._ready.look(partition.name, partition)
        ordinals, times = self._births[partition.name]
        end = partition.base + partition.table.used
        if end > (ordinals[-1] if ordinals else 0):
            ordinals.append(end)
            times.append(now)
        if len(ordinals) > _MOST_BIRTHS:
            del ordinals[:-1:2], times[:-1:2]

    def _look_at_waiters(self, now: float) -> float:
        """Count the waits that go on. Returns how long the oldest has lasted."""
        lines: dict[Any, list[Waiter]] = {}
        for waiter in islice(self._controller.core.wait_queue, _MOST_WAITERS):
            lines.setdefault(waiter.key, []).append(waiter)
        self._find_lacks(lines)
        oldest = now
        for key, waiters in lines.items():
            oldest = min(oldest, *(waiter.since for waiter in waiters))
            if key is None:
                continue
            seconds = sum(now - max(waiter.since, self._sampled) for waiter in waiters)
            wanted = sum(waiter.command.batch_size for waiter in waiters if isinstance(waiter.command, Fetch))
            self._wait(key[0], key[1], self._lacks.get(key, _Reason("rows")), max(0.0, seconds))
            for flow in (self._whole, self._partitions.get(key[0]), self._tasks.get(key[1])):
                if flow is not None:
                    flow.wanted += wanted
        return now - oldest

    def _find_lacks(self, lines: Mapping[Any, list[Waiter]]) -> None:
        """Look again what they lack, those first that were looked at longest ago, for 2 ms."""
        self._lacks = {key: reason for key, reason in self._lacks.items() if key in lines}
        fresh = [key for key in lines if key is not None and key not in self._lacks]
        until = perf_counter() + _LOOK_S
        for key in [*fresh, *self._lacks]:
            self._lacks.pop(key, None)
            command = lines[key][0].command
            assert isinstance(command, Fetch)
            self._lacks[key] = self._lack(command)  # last in order: looked at just now
            if perf_counter() > until:
                break

    def _lack(self, command: Fetch) -> _Reason:
        core = self._controller.core
        partition = core.state.partitions.get(command.partition)
        if partition is None:
            return _Reason("partition")
        missing = core.serving.missing(command, partition)
        field = max(missing, key=lambda name: missing[name], default="")
        if not missing.get(field):
            return _Reason("rows")
        write = self._controller.last_writes.of(field)
        producer = "" if write is None else self._controller.last_writes.producer_of(field, write.client)
        return _Reason("field", field, producer)

    def _stage(self, client: str) -> str:
        return self._controller.last_writes.task_of(client) or client

    def _fill(self) -> tuple[float, float]:
        """The used share of all units, and that of the fullest."""
        infos = [unit.info for unit in self._controller.units]
        whole = sum(info.capacity for info in infos)
        shares = [info.used / info.capacity for info in infos if info.capacity]
        return sum(info.used for info in infos) / max(1, whole), max(shares, default=0.0)

    # ---------------------------------------------------------------------------------------------------- the answer

    async def page(self, query: Mapping[str, str]) -> tuple[str, list[bytes]]:
        """JSON for ``/api/history?span=SECONDS&partition=NAME``."""
        try:
            span_s = float(query.get("span", "3600"))
        except ValueError:
            span_s = math.nan
        if not span_s > 0:
            span_s = 3600.0
        asked = min(max(span_s, _SPANS_S[0]), _SPANS_S[1]), query.get("partition", "")
        if asked not in self._answers:
            if len(self._answers) == _MOST_ANSWERS:
                self._answers.clear()
            self._answers[asked] = _JSON.encode(self.view(*asked))
        return "application/json", [self._answers[asked]]

    async def timeline_page(self, query: Mapping[str, str]) -> tuple[str, list[bytes]]:
        """JSON for ``/api/timeline?partition=NAME``: the newest events, and waits that go on as events of number 0.
        Times are seconds since 1970."""
        offset = time.time() - monotonic()
        events = self.timeline.view(query.get("partition", "")) + self._waits_going_on(query.get("partition", ""))
        for event in events:
            event["start"] += offset
            event["end"] += offset
        found = {"time": time.time(), "events": events, "left_out": self.timeline.left_out}
        return "application/json", [_JSON.encode(found)]

    def _waits_going_on(self, partition: str) -> list[dict[str, Any]]:
        now, found = monotonic(), []
        for waiter in islice(self._controller.core.wait_queue, _MOST_WAITERS):
            command, session = waiter.command, self._controller.clients.get(waiter.client)
            if isinstance(command, Fetch) and partition in ("", command.partition):
                client = "" if session is None else session.client_id
                fields, rows = tuple(command.fields), command.batch_size
                event = Event(0, "wait", command.task, client, command.partition, fields, rows, waiter.since, now)
                found.append(event._asdict())
        return found

    def view(self, span_s: float, partition: str) -> dict[str, Any]:
        """Plain values: the queue, its tasks, the reasons of waits and one partition over the newest ``span_s``
        seconds. Times are seconds since 1970; None: nothing was recorded."""
        groups, core = self.history.groups, self._controller.core
        queue = self.history.read("queue", [""], span_s, _POINTS)
        one = self.history.read("partitions", [partition], span_s, _POINTS)
        kept = groups["partitions"].slots
        return {
            "time": time.time(),
            "start": time.time() - monotonic() + queue.start,
            "step_s": queue.step_s,
            "began": time.time() - monotonic() + self._began,
            "queue": _rounded(queue.series.get("", {})),
            "tasks": [{"task": key, **_rounded(values)} for key, values in self._of("tasks", span_s)],
            "reasons": [{**key._asdict(), **_rounded(values)} for key, values in self._of("reasons", span_s)],
            "partition": {"name": partition, **_rounded(one.series[partition])} if partition in one.series else None,
            "partitions": list(kept),
            "left_out": {
                "partitions": len(core.state.partitions) - sum(name in core.state.partitions for name in kept),
                "tasks": groups["tasks"].left_out,
                "reasons": groups["reasons"].left_out,
                "requests": max(0, len(core.wait_queue) - _MOST_WAITERS),
            },
            "bytes": self.history.nbytes,
        }

    def _of(self, group: str, span_s: float) -> list[tuple[Any, dict[str, list[float]]]]:
        """Keys with a value other than zero in this time."""
        found = self.history.read(group, list(self.history.groups[group].slots), span_s, _POINTS).series
        return [
            (key, values)
            for key, values in found.items()
            if any(value == value and value for column in values.values() for value in column)
        ]


def _key(command: Fetch) -> Any:
    return command.partition, command.task, tuple(sorted(set(command.fields)))


def _overlap(one: bytes, other: bytes) -> bool:
    return bool(np.isin(np.frombuffer(one, np.int64), np.frombuffer(other, np.int64)).any())


def _rounded(series: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """Three digits, which is what a plot can show."""
    return {
        column: [None if value != value else float(f"{value:.3g}") for value in values]
        for column, values in series.items()
    }
