"""Which changes of a queue become Kubernetes events, and what these look like."""

from __future__ import annotations

import re

import pytest

from tests.unit.operator.queues import document
from tq_operator.runtime.events import EventGate, event

SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*"


def test_the_same_news_is_told_once_in_ten_minutes() -> None:
    now = [0.0]
    gate = EventGate(lambda: now[0])
    assert gate.admits("q", "Degraded", "CrashLooping")
    assert not gate.admits("q", "Degraded", "CrashLooping")
    assert gate.admits("q", "Degraded", "OutOfMemory")
    assert gate.admits("other", "Degraded", "CrashLooping")
    now[0] = 601.0
    assert gate.admits("q", "Degraded", "CrashLooping")


@pytest.mark.parametrize("name", ["q", "a" * 253, "a" * 199 + "-" + "b" * 53, "a" * 199 + "." + "b" * 53])
@pytest.mark.parametrize("words", ["short", "x" * 5000, "\u8bb0\u5fc6" * 1000])
def test_the_apiserver_takes_the_event_of_any_queue_and_message(name: str, words: str) -> None:
    condition = {"type": "Degraded", "status": "True", "reason": "CrashLooping", "message": words}
    made = event(document("{}", name), {**condition, "lastTransitionTime": "2026-01-01T00:00:00Z"}, "test")
    assert re.fullmatch(SUBDOMAIN, made["metadata"]["name"])
    assert len(made["metadata"]["name"]) <= 253
    assert 0 < len(made["note"].encode()) <= 1024
    assert words.startswith(made["note"])
