"""The newest events of a queue."""

from __future__ import annotations

from transfer_queue.control.schema import FieldSchema
from transfer_queue.runtime.timeline import Timeline

TOKENS = [FieldSchema("tokens", "ragged", "int64", (None,))]


def test_a_wait_is_kept_with_the_put_that_ended_it_at_any_rate() -> None:
    timeline = Timeline(lambda client: "rollout")
    for number in range(1000):
        timeline.put("r0", "train", TOKENS, 1, 10.0, 10.0 + number / 2000)
    timeline.wait("trainer", "t0", "train", ["tokens"], 8, 10.0, 10.6, True)
    *_, put, wait = timeline.view()
    assert (put["kind"], put["stage"], put["end"], put["fields"]) == ("put", "rollout", 10.4995, ("tokens",))
    assert (wait["kind"], wait["ended_by"]) == ("wait", put["number"])
    assert timeline.left_out == 799
    assert len(timeline.view()) == 202


def test_a_wait_that_no_put_ended_has_no_arrow_and_other_partitions_are_left_out() -> None:
    timeline = Timeline(lambda client: "rollout")
    timeline.put("r0", "train", TOKENS, 1, 10.0, 10.0)
    timeline.wait("trainer", "t0", "other", ["tokens"], 0, 10.0, 12.0, False)
    assert [(event["kind"], event["ended_by"]) for event in timeline.view("other")] == [("wait", 0)]


def test_all_waits_that_one_put_ended_are_kept_with_it_however_many_there_are() -> None:
    timeline = Timeline(lambda client: "rollout")
    timeline.put("r0", "train", TOKENS, 8, 10.0, 10.0)
    for _ in range(5000):
        timeline.wait("trainer", "t0", "train", ["tokens"], 8, 10.0, 11.0, True)
    assert {event["ended_by"] for event in timeline.view()} == {1}
