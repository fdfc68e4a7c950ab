"""The newest puts, waits and gets of a queue, for the page: who did what when, and which put ended whose wait.

No I/O and no clock: time is given. It is kept all the time, so that the steps before a question are there. At high
rates it is a sample: so many events a second, and each wait that is longer than a moment with the put that ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Event", "Timeline"]

_MOST, _A_SECOND = 4096, 200
_LONG_S = 0.05
"""A wait that is kept at any rate."""
_MOST_FIELDS = 8
_Put: TypeAlias = "tuple[str, str, Sequence[Any], int, float, float]"
"""Client, partition, fields, rows, start, end."""


class Event(NamedTuple):
    """``kind``: put, wait or get. ``stage``: the task for which a client fetches, else its name. ``ended_by``: the
    number of the put that ended a wait, 0 for none. Times are those of the caller."""

    number: int
    kind: str
    stage: str
    client: str
    partition: str
    fields: tuple[str, ...]
    rows: int
    start: float
    end: float
    ended_by: int = 0


class Timeline:
    """Events in the order of their ends. ``left_out``: how many were not kept because there were too many.

    Args:
        stage_of: The stage of a client, asked for events that are kept.
    """

    def __init__(self, stage_of: Callable[[str], str]) -> None:
        self.left_out = 0
        self._stage_of = stage_of
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._number = 0
        self._second = 0
        self._left = _A_SECOND
        self._last_put: _Put | None = None  # one that was not kept: kept once it is known to have ended a wait
        self._kept_put = 0  # the number of the last put that was kept

    def room(self, now: float) -> bool:
        """Whether one more event of this second is kept."""
        if not self._second <= now < self._second + 1:
            self._second, self._left = int(now), _A_SECOND
        if self._left > 0:
            self._left -= 1
            return True
        self.left_out += 1
        return False

    def put(self, client: str, partition: str, fields: Sequence[Any], rows: int, start: float, end: float) -> None:
        """``fields``: what has a ``name``."""
        put = client, partition, fields, rows, start, end
        if self.room(end):
            self._keep_put(put)
        else:
            self._last_put = put

    def _keep_put(self, put: _Put) -> None:
        client, partition, fields, rows, start, end = put
        names = [field.name for field in fields[:_MOST_FIELDS]]
        self._keep("put", self._stage_of(client), client, partition, names, rows, start, end)
        self._last_put, self._kept_put = None, self._number

    def get(
        self, task: str, client: str, partition: str, fields: Sequence[str], rows: int, start: float, end: float
    ) -> None:
        """A fetch of ``task``, or with an empty one a read by key or index."""
        if self.room(end):
            self._keep("get", task or self._stage_of(client), client, partition, fields, rows, start, end)

    def wait(
        self,
        task: str,
        client: str,
        partition: str,
        fields: list[str],
        rows: int,
        start: float,
        end: float,
        ended_by_last_put: bool,
    ) -> None:
        """A fetch waited. ``ended_by_last_put``: the newest put completed its batch."""
        if end - start < _LONG_S and not self.room(end):
            return
        if ended_by_last_put and self._last_put is not None:
            self._keep_put(self._last_put)
            self.left_out -= 1
        put = self._kept_put if ended_by_last_put else 0
        self._keep("wait", task, client, partition, fields, rows, start, end, put)

    def _keep(
        self,
        kind: str,
        stage: str,
        client: str,
        partition: str,
        fields: Sequence[str],
        rows: int,
        start: float,
        end: float,
        ended_by: int = 0,
    ) -> None:
        self._number += 1
        names = tuple(fields[:_MOST_FIELDS])
        self._events.append(Event(self._number, kind, stage, client, partition, names, rows, start, end, ended_by))

    def view(self, partition: str = "", most: int = 600) -> list[dict[str, Any]]:
        """The newest events, of one partition if it is given, as plain values."""
        found: list[dict[str, Any]] = []
        for event in reversed(self._events):
            if partition in ("", event.partition):
                found.append(event._asdict())
                if len(found) == most:
                    break
        return found[::-1]
