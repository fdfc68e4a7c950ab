"""Schedules: an interval, or the times of a cron expression, in UTC. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Final

__all__ = ["SCHEDULE", "next_time"]

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LOOK_AHEAD: Final = timedelta(days=366 * 8)
"""The longest time between two 29 February."""


def _field(number: str) -> str:
    """The pattern of a field of cron whose numbers match ``number``."""
    item = rf"(\*|{number}(-{number})?)(/[1-9][0-9]?)?"
    return f"{item}(,{item})*"


_NUMBERS: Final = (
    ("[0-5]?[0-9]", 0, 59),  # minute
    ("([01]?[0-9]|2[0-3])", 0, 23),  # hour
    ("(0?[1-9]|[12][0-9]|3[01])", 1, 31),  # day of the month
    ("(0?[1-9]|1[0-2])", 1, 12),  # month
    ("[0-7]", 0, 7),  # day of the week, where 0 and 7 are Sunday
)
SCHEDULE: Final = f"^([1-9][0-9]{{0,5}}[smhd]|{' '.join(_field(number) for number, _, _ in _NUMBERS)})$"
"""Pattern of a schedule: ``90s``, ``5m``, ``1h``, ``1d``, or minute, hour, day, month and day of the week."""


def next_time(schedule: str, after: datetime) -> datetime | None:
    """The first time of ``schedule`` later than ``after``; None if it never comes, such as 30 February.

    Args:
        schedule: Text that matches :data:`SCHEDULE`. An interval counts from 1970, so that a restart does not move
            its times.
        after: A time with a time zone.

    Example:
        >>> next_time("*/10 * * * *", datetime(2026, 1, 1, 12, 34, tzinfo=timezone.utc)).isoformat()
        '2026-01-01T12:40:00+00:00'
    """
    after = after.astimezone(timezone.utc)
    if schedule[-1] in _UNITS:
        interval = int(schedule[:-1]) * _UNITS[schedule[-1]]
        return datetime.fromtimestamp((int(after.timestamp()) // interval + 1) * interval, timezone.utc)
    fields = schedule.split(" ")
    minutes, hours, days, months, weekdays = (
        _numbers(field, low, high) for field, (_, low, high) in zip(fields, _NUMBERS, strict=True)
    )
    weekdays = {number % 7 for number in weekdays}
    either = not fields[2].startswith("*") and not fields[4].startswith("*")  # cron: one of the two is enough
    start = after.replace(second=0, microsecond=0) + timedelta(minutes=1)
    day = start
    while day <= start + _LOOK_AHEAD:
        matches = day.day in days, day.isoweekday() % 7 in weekdays
        if day.month in months and (any(matches) if either else all(matches)):
            for hour in sorted(hour for hour in hours if hour >= day.hour):
                for minute in sorted(minutes):
                    if (found := day.replace(hour=hour, minute=minute)) >= start:
                        return found
        day = (day + timedelta(days=1)).replace(hour=0, minute=0)
    return None


def _numbers(field: str, low: int, high: int) -> set[int]:
    """The numbers that a field of cron allows. A range may pass the end, such as the hours 22-2."""
    found: set[int] = set()
    for item in field.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            listed = list(range(low, high + 1))
        elif last and int(last) < int(first):
            listed = [*range(int(first), high + 1), *range(low, int(last) + 1)]
        else:
            listed = list(range(int(first), (int(last) if last else high if step else int(first)) + 1))
        found.update(listed[:: int(step or 1)])
    return found
