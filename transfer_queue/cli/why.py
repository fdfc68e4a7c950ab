"""``tq why``: what each waiting request waits for, in words."""

from __future__ import annotations

from typing import Any

__all__ = ["explain"]


def explain(picture: dict[str, Any], partition: str | None = None) -> list[str]:
    """Sentences about the requests that wait, the longest wait first, and about storage units that are missing.

    Args:
        picture: See ``transfer_queue.runtime.picture``.
        partition: Only requests for this partition.
    """
    waiters = [each for each in picture["waiters"] if partition in (None, each["partition"])]
    found = [_waits(each) for each in sorted(waiters, key=lambda each: -each["waited_s"])]
    if not found:
        found.append("no request is waiting" + ("" if partition is None else f" for partition {partition!r}"))
    connected = sum(unit["connected"] for unit in picture["units"])
    if connected < picture["expected_units"]:
        found.append(f"{connected} of {picture['expected_units']} storage units are connected")
    return found


def _waits(waiter: dict[str, Any]) -> str:
    who = f"task {waiter['task']!r}" if waiter["kind"] == "fetch" else "a put"
    wanted = f"{waiter['rows']} row{'' if waiter['rows'] == 1 else 's'}"
    place = "of" if waiter["kind"] == "fetch" else "in"
    return (
        f"{who} has waited {waiter['waited_s']:.0f} s for {wanted} {place} {waiter['partition']!r}: {waiter['lacks']}"
    )
