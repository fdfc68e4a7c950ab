"""What notebooks show of metadata."""

from __future__ import annotations

import torch

from transfer_queue.client.status import QueueStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta


def test_keys_and_tags_are_a_table_of_text() -> None:
    shown = KVBatchMeta(keys=["a<b>"], tags=[{"n": 1}], partition_id="p&q", fields=["x"])._repr_html_()
    assert "1 keys of partition p&amp;q with x" in shown
    assert "<td>a&lt;b&gt;</td><td>{&#x27;n&#x27;: 1}</td>" in shown
    assert "<b>" not in shown


def test_a_batch_shows_its_fields_and_which_rows_are_ready() -> None:
    schema = {"x": {"dtype": torch.float32, "shape": (3,), "is_nested": False, "is_non_tensor": False}}
    shown = BatchMeta([7, 8], ["p", "p"], schema, [1, 0])._repr_html_()
    assert "2 rows, 1 ready: x torch.float32 (3,)" in shown
    assert "<td>7</td><td>p</td><td>yes</td>" in shown
    assert "<td>8</td><td>p</td><td>no</td>" in shown


def test_a_long_batch_shows_its_first_rows_and_how_many_more() -> None:
    keys = [f"key-{number}" for number in range(100)]
    shown = KVBatchMeta(keys=keys, tags=[{}] * 100, partition_id="p")._repr_html_()
    assert shown.count("<td>key-") == 20
    assert "and 80 more rows" in shown


def test_an_empty_batch_is_a_title() -> None:
    assert BatchMeta()._repr_html_() == "<p><strong>0 rows, 0 ready: no fields</strong></p>"


def test_the_state_of_a_queue_is_a_table_with_bars_and_plain_text() -> None:
    partition = {
        "name": "<b>train",
        "rows": 4,
        "lost": 0,
        "fields": {"tokens": 4, "re&ward": 1},
        "subscriptions": [{"task": "trainer", "consumed": 1, "ready": 0, "waiting": 2}],
    }
    picture = {
        "queue": "default",
        "rows": 4,
        "clients": 1,
        "partitions": [partition],
        "waiters": [],
        "units": [{"connected": True}, {"connected": False}],
        "expected_units": 2,
    }
    status = QueueStatus(picture)
    assert repr(status).splitlines() == [
        "default: 4 rows, 1 partition, 1 client, 1 of 2 storage units",
        "  <b>train: 4 rows; tokens 4/4, re&ward 1/4",
        "no request is waiting",
        "1 of 2 storage units are connected",
    ]
    shown = status._repr_html_()
    assert "&lt;b&gt;train" in shown
    assert "re&amp;ward 1/4" in shown
    assert "width:25%" in shown
    assert "trainer: 1 consumed, 0 ready, 2 waiting" in shown
    assert "<b>" not in shown
