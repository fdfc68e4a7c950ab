"""Times of schedules."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import pytest

from transfer_queue.config.schedule import SCHEDULE, next_time

AFTER = datetime(2026, 11, 29, 22, 50, 30, tzinfo=timezone.utc)  # a Sunday


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("90s", "2026-11-29T22:51:00"),
        ("5m", "2026-11-29T22:55:00"),
        ("1d", "2026-11-30T00:00:00"),
        ("* * * * *", "2026-11-29T22:51:00"),
        ("*/20 * * * *", "2026-11-29T23:00:00"),
        ("50 22 * * *", "2026-11-30T22:50:00"),
        ("15,45 1-3 * * *", "2026-11-30T01:15:00"),
        ("0 23-1 * * *", "2026-11-29T23:00:00"),
        ("0 0 * * 7", "2026-12-06T00:00:00"),
        ("0 0 1 * *", "2026-12-01T00:00:00"),
        ("0 0 15 * 1", "2026-11-30T00:00:00"),  # either the day or the weekday
        ("0 12 29 2 *", "2028-02-29T12:00:00"),
        ("0 0 30 2 *", None),
    ],
)
def test_the_next_time_is_the_first_one_after_now(schedule: str, expected: str | None) -> None:
    assert re.fullmatch(SCHEDULE, schedule)
    found = next_time(schedule, AFTER.astimezone(timezone(timedelta(hours=5))))
    assert found == (expected and datetime.fromisoformat(f"{expected}+00:00"))


@pytest.mark.parametrize(
    "text", ["", "5", "0m", "m", "5 m", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "*/0 * * * *", "1000000d"]
)
def test_other_texts_are_no_schedule(text: str) -> None:
    assert not re.fullmatch(SCHEDULE, text)
