"""What a controller remembers of its past: bounded time series in ring buffers. No I/O and no clock: time is given.

Series belong to groups, such as the partitions or the tasks. A group has room for a number of keys; the most active
ones have it. Two rings hold all series: one value a second for an hour, one a minute for a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Gauge", "Group", "History", "Rate", "Window"]

_HOUR, _DAY, _MINUTE_S = 3600, 1440, 60
_FORGET = 0.98
"""Per second, of the activity by which keys compete for room."""

Floats = NDArray[np.float32]


class Gauge(str):
    """A column of which a coarser value is the highest: waiting requests, fill."""


class Rate(str):
    """A column of which a coarser value is the mean: rows a second."""


class Window(NamedTuple):
    """Values at equal distances. ``start``: the time of the first, on the clock of `History.record`, in seconds."""

    start: float
    step_s: float
    series: dict[Any, dict[str, list[float]]]
    """Key -> column -> values; NaN where nothing was recorded."""


class Group:
    """Keys of one kind and their columns. ``left_out``: keys that asked for room in vain, last time."""

    def __init__(self, columns: Sequence[Gauge | Rate], most: int, first: int) -> None:
        self.columns = columns
        self.first = first
        self.slots: dict[Any, int] = {}
        self.left_out = 0
        self._free = list(range(most))[::-1]
        self._activity = np.zeros(most)

    def admit(self, activity: Mapping[Any, float]) -> list[int]:
        """Give room to active keys, the most active first. Returns the slots that changed hands."""
        self._activity *= _FORGET
        new = []
        for key, amount in activity.items():
            slot = self.slots.get(key)
            if slot is None:
                new.append((amount, key))
            else:
                self._activity[slot] += amount
        new.sort(key=lambda item: item[0], reverse=True)
        changed: list[int] = []
        key_of: dict[int, Any] | None = None
        self.left_out = 0
        for amount, key in new:
            if self._free:
                slot = self._free.pop()
            else:
                slot = int(self._activity.argmin())
                if self._activity[slot] >= amount:
                    self.left_out = len(new) - len(changed)
                    break
                if key_of is None:
                    key_of = {place: name for name, place in self.slots.items()}
                del self.slots[key_of[slot]]
                key_of[slot] = key
            self.slots[key] = slot
            self._activity[slot] = amount
            changed.append(slot)
        return changed

    def place(self, slot: int) -> slice:
        """The columns of a slot among those of all series."""
        width = len(self.columns)
        return slice(self.first + slot * width, self.first + (slot + 1) * width)


class _Ring:
    def __init__(self, points: int, series: int) -> None:
        self.values: Floats = np.full((points, series), np.nan, np.float32)
        self.newest = -1

    def write(self, tick: int, row: NDArray[Any]) -> None:
        points = len(self.values)
        for skipped in range(max(self.newest + 1, tick - points + 1), tick):
            self.values[skipped % points] = np.nan
        self.values[tick % points] = row
        self.newest = tick

    def read(self, first: int, columns: NDArray[np.int64]) -> Floats:
        """The values from tick ``first`` to the newest, oldest first; ticks before the ring began are NaN."""
        points = len(self.values)
        ticks = np.arange(first, self.newest + 1)
        found: Floats = self.values[(ticks % points)[:, None], columns[None, :]]
        found[(ticks < 0) | (ticks <= self.newest - points)] = np.nan
        return found


class History:
    """The series of all groups.

    Args:
        groups: Name of a group -> its columns and how many keys it has room for.
        start: The time at which it begins, in seconds.
    """

    def __init__(self, groups: Mapping[str, tuple[Sequence[Gauge | Rate], int]], start: float) -> None:
        self.groups: dict[str, Group] = {}
        highest: list[bool] = []
        for name, (columns, most) in groups.items():
            self.groups[name] = Group(columns, most, len(highest))
            highest += [isinstance(column, Gauge) for column in columns] * most
        self._start = start
        self._highest = np.array(highest)
        self._hour = _Ring(_HOUR, len(highest))
        self._day = _Ring(_DAY, len(highest))
        self._row = np.full(len(highest), np.nan, np.float32)
        self._sum = np.zeros(len(highest))
        self._count = np.zeros(len(highest))
        self._most = np.full(len(highest), -np.inf)
        self._minute = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rings."""
        return self._hour.values.nbytes + self._day.values.nbytes

    def admit(self, group: str, activity: Mapping[Any, float]) -> Iterable[Any]:
        """Give room to the most active keys of a group. Returns the keys that have room now."""
        found = self.groups[group]
        for slot in found.admit(activity):
            place = found.place(slot)
            self._hour.values[:, place] = self._day.values[:, place] = np.nan
            self._sum[place] = self._count[place] = 0
            self._most[place] = -np.inf
        return found.slots.keys()

    def record(self, now: float, values: Mapping[str, Mapping[Any, Sequence[float]]]) -> None:
        """Keep the values of this second: group -> key -> a value for each column. Keys without room are ignored."""
        row = self._row
        row[:] = np.nan
        for name, keys in values.items():
            group = self.groups[name]
            for key, numbers in keys.items():
                if (slot := group.slots.get(key)) is not None:
                    row[group.place(slot)] = numbers
        tick = int(now - self._start)
        if tick <= self._hour.newest:
            return
        self._hour.write(tick, row)
        if tick // _MINUTE_S != self._minute:
            self._end_minute()
            self._minute = tick // _MINUTE_S
        known = ~np.isnan(row)
        self._sum[known] += row[known]
        self._count += known
        np.maximum(self._most, row, out=self._most, where=known)

    def _end_minute(self) -> None:
        self._day.write(self._minute, self._so_far())
        self._sum[:] = self._count[:] = 0
        self._most[:] = -np.inf

    def _so_far(self) -> NDArray[Any]:
        mean = self._sum / np.maximum(self._count, 1)
        return np.where(self._count == 0, np.nan, np.where(self._highest, self._most, mean))

    def read(self, group: str, keys: Iterable[Any], span_s: float, points: int) -> Window:
        """The newest ``span_s`` seconds, in at most ``points`` values: up to an hour from the values of seconds."""
        found = self.groups[group]
        known = [key for key in keys if key in found.slots]
        places = [np.arange(len(self._row))[found.place(found.slots[key])] for key in known]
        columns = np.concatenate([np.zeros(0, np.int64), *places])
        ring, unit = (self._hour, 1) if span_s <= _HOUR else (self._day, _MINUTE_S)
        ticks = max(1, min(len(ring.values), round(span_s / unit)))
        step = -(-ticks // points)
        end = -(-(ring.newest + 1) // step) * step  # multiples of the step, so that values do not change with time
        first = end - max(1, ticks // step) * step
        values = _coarser(ring.read(first, columns), step, self._highest[columns])
        width = len(found.columns)
        series = {
            key: {str(column): values[:, number * width + place].tolist() for place, column in enumerate(found.columns)}
            for number, key in enumerate(known)
        }
        return Window(self._start + first * unit, step * unit, series)


def _coarser(values: Floats, step: int, highest: NDArray[np.bool_]) -> Floats:
    """One row for each ``step`` rows: the highest or the mean of each column."""
    lacking = -len(values) % step
    values = np.concatenate([values, np.full((lacking, values.shape[1]), np.nan, np.float32)])
    parts = values.reshape(len(values) // step, step, values.shape[1])
    known = ~np.isnan(parts)
    counts = known.sum(1)
    most = np.where(known, parts, -np.inf).max(1, initial=-np.inf)
    mean = np.where(known, parts, 0).sum(1) / np.maximum(counts, 1)
    return np.where(counts == 0, np.nan, np.where(highest, most, mean)).astype(np.float32)
