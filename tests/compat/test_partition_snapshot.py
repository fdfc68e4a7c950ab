"""What the controller's actor says about a partition, as programs of 0.1.x read it."""

from __future__ import annotations

import pickle

import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from transfer_queue.compat.partition_snapshot import snapshot


def test_a_snapshot_has_rows_keys_tags_and_states(queue: Stack, partition: str) -> None:
    client = tq.get_client()
    client.put(TensorDict({"x": torch.zeros(3)}, [3]), partition_id=f"{partition} before")  # so that indexes are large
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"x": torch.zeros(2)}, [2]), tags=[{"n": 1}, {}])
    tq.kv_put("b", partition, {"y": torch.tensor(1)})
    client.put(TensorDict({"x": torch.zeros(1)}, [1]), partition_id=partition)
    client.get_meta(["x"], 1, partition, task_name="train")
    found = pickle.loads(pickle.dumps(snapshot(client, partition)))
    a, b = found.keys_mapping["a"], found.keys_mapping["b"]
    assert found.revert_keys_mapping == {a: "a", b: "b"}
    assert {a, b} < found.global_indexes
    assert (found.total_samples_num, found.total_fields_num, found.custom_meta) == (3, 2, {a: {"n": 1}})
    x, y = found.field_name_mapping["x"], found.field_name_mapping["y"]
    produced, consumed = found.production_status, found.consumption_status["train"]
    assert [int(produced[row, column]) for row in (a, b) for column in (x, y)] == [1, 0, 1, 1]
    assert [int(consumed[row]) for row in (a, b)] == [1, 0]
    assert (produced[b, y] == 1, int(produced[0, x])) == (True, 0)
    assert snapshot(client, "nowhere") is None
    tq.kv_put("only a tag", f"{partition} tags", tag={"done": True})
    empty = snapshot(client, f"{partition} tags")
    assert empty is not None
    assert (list(empty.keys_mapping), empty.field_name_mapping) == (["only a tag"], {})
