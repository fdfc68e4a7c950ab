"""Ring buffers of a controller's past."""

from __future__ import annotations

import math

import numpy as np

from transfer_queue.runtime.history import Gauge, History, Rate


def make_history(most: int = 2) -> History:
    return History({"tasks": ((Rate("rows_out"), Gauge("waiting")), most), "queue": ((Gauge("rows"),), 1)}, start=100.0)


def test_an_hour_has_a_value_a_second_and_gaps_where_nothing_was_recorded() -> None:
    history = make_history()
    history.admit("tasks", {"trainer": 1.0})
    for second in (0, 1, 2, 5):
        history.record(100.0 + second, {"tasks": {"trainer": (second, 10 * second)}})
    window = history.read("tasks", ["trainer", "unknown"], 8, 300)
    assert (window.start, window.step_s) == (98.0, 1)
    np.testing.assert_equal(window.series["trainer"]["rows_out"], [math.nan, math.nan, 0, 1, 2, math.nan, math.nan, 5])
    assert window.series["trainer"]["waiting"][-1] == 50
    assert "unknown" not in window.series


def test_coarser_values_are_means_of_rates_and_the_highest_of_gauges() -> None:
    history = make_history()
    history.admit("tasks", {"trainer": 1.0})
    for second in range(7200):
        history.record(100.0 + second, {"tasks": {"trainer": (second % 2, second % 60)}})
    for span_s, step_s in ((3600, 60), (86400, 1440)):
        window = history.read("tasks", ["trainer"], span_s, 60)
        assert window.step_s == step_s
        assert window.series["trainer"]["rows_out"][-2] == 0.5
        assert window.series["trainer"]["waiting"][-2] == 59


def test_the_rings_forget_what_is_older_than_an_hour() -> None:
    history = make_history()
    history.admit("queue", {"": 1.0})
    for second in (*range(10), 3605):
        history.record(100.0 + second, {"queue": {"": (second,)}})
    values = history.read("queue", [""], 3600, 3600).series[""]["rows"]
    assert [value for value in values if not math.isnan(value)] == [6, 7, 8, 9, 3605]


def test_more_active_keys_take_the_room_of_less_active_ones_and_start_empty() -> None:
    history = make_history()
    assert set(history.admit("tasks", {"a": 5.0, "b": 9.0})) == {"a", "b"}
    history.record(100.0, {"tasks": {"a": (1, 1), "b": (2, 2)}})
    assert set(history.admit("tasks", {"c": 7.0, "d": 1.0})) == {"b", "c"}
    assert history.groups["tasks"].left_out == 1
    history.record(101.0, {"tasks": {"c": (3, 3)}})
    window = history.read("tasks", ["b", "c"], 2, 10)
    np.testing.assert_equal(window.series["c"]["rows_out"], [math.nan, 3])
    np.testing.assert_equal(window.series["b"]["rows_out"], [2, math.nan])
    assert history.read("tasks", [], 3600, 10).series == {}


def test_a_new_key_takes_the_last_free_room_and_another_that_of_an_older_key() -> None:
    history = make_history()
    history.admit("tasks", {"a": 1.0})
    assert set(history.admit("tasks", {"b": 9.0, "c": 7.0})) == {"b", "c"}


def test_the_size_does_not_grow() -> None:
    history = make_history()
    before = history.nbytes
    for second in range(100):
        history.admit("tasks", {f"task {second}-{number}": 1.0 + second for number in range(50)})
        history.record(100.0 + second, {})
    assert history.nbytes == before
    assert len(history.groups["tasks"].slots) == 2
