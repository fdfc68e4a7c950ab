"""Which changes of a queue become Kubernetes events."""

from __future__ import annotations

from tq_operator.runtime.events import EventGate


def test_the_same_news_is_told_once_in_ten_minutes() -> None:
    now = [0.0]
    gate = EventGate(lambda: now[0])
    assert gate.admits("q", "Degraded", "CrashLooping")
    assert not gate.admits("q", "Degraded", "CrashLooping")
    assert gate.admits("q", "Degraded", "OutOfMemory")
    assert gate.admits("other", "Degraded", "CrashLooping")
    now[0] = 601.0
    assert gate.admits("q", "Degraded", "CrashLooping")
