"""Two runs of the same tests as a table."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Outcomes", "compare"]

Outcomes = dict[str, str]
"""Test id -> passed, failed, error or skipped."""


def compare(theirs: Outcomes, ours: Outcomes, *, reasons: Mapping[str, str]) -> tuple[str, list[str]]:
    """The table in words, and the tests that pass with 0.1.x alone and have no reason for that."""
    lines = [
        f"passes with 0.1.x: {_passed(theirs)} of {len(theirs)}",
        f"passes here:       {_passed(ours)} of {len(ours)}",
    ]
    differing = []
    for test in sorted({*theirs, *ours}):
        before, now = theirs.get(test, "absent"), ours.get(test, "absent")
        if before == now:
            continue
        reason = next((reason for begin, reason in reasons.items() if test.startswith(begin)), "")
        if before == "passed" and not reason:
            differing.append(test)
        lines.append(f"  {before} -> {now}  {test}" + (f"  ({reason})" if reason else ""))
    lines.append(f"differences without a reason: {len(differing)}")
    return "\n".join(lines), differing


def _passed(outcomes: Outcomes) -> int:
    return sum(outcome == "passed" for outcome in outcomes.values())
