"""The calls of ROLL, which is written for 0.1.6: dense columns, and workers that are forked off attached processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack
from tests.integration.test_client_process import in_forked_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def dense(stack: Stack) -> Iterator[Stack]:
    """Attached as ROLL's workers are, in the layout of 0.1.6."""
    tq.init(
        {"layout": "dense", "security": {"allowPickle": True}, "controller": {"addresses": [stack.address]}},
    )
    yield stack
    tq.close()


def batch(start: int) -> TensorDict:
    return TensorDict(
        {"input_ids": torch.arange(start, start + 6).view(2, 3), "scores": torch.tensor([0.5, 1.5]) + start}, [2]
    )


def test_uniform_columns_come_back_dense_and_ragged_ones_as_they_are(dense: Stack, partition: str) -> None:
    ragged = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(4)], layout=torch.jagged)
    equal = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(2)], layout=torch.jagged)
    none = torch.nested.as_nested_tensor([torch.ones(0), torch.ones(0)], layout=torch.jagged)
    data = batch(0).update({"ragged": ragged, "equal": equal, "none": none})
    meta = tq.kv_batch_put(["a", "b"], partition, data, tags=[{"step": 1}, {"step": 2}])
    got = tq.kv_batch_get_by_meta(meta)
    assert got["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got["scores"].tolist() == [0.5, 1.5]
    assert got["equal"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert tuple(got["none"].shape) == (2, 0)
    assert got["ragged"].offsets().diff().tolist() == [1, 4]


def test_a_worker_forked_off_with_hooks_works_beside_its_parent(dense: Stack, partition: str) -> None:
    seen: list[str] = []
    os.register_at_fork(after_in_child=lambda: seen.append("child"))
    tq.kv_batch_put(["a", "b"], partition, batch(0))

    def child() -> None:
        assert seen == ["child"]
        got: Any = tq.kv_batch_get(["b", "a"], partition)
        assert got["input_ids"].numpy().tolist() == [[3, 4, 5], [0, 1, 2]]
        tq.kv_batch_put(["c", "d"], partition, batch(6))
        tq.kv_clear(["a"], partition)

    assert in_forked_child(child) == 0
    assert list(tq.kv_list(partition)[partition]) == ["b", "c", "d"]
    assert tq.kv_batch_get(["d"], partition, "scores")["scores"].tolist() == [7.5]


def test_low_level_rows_are_dense_too_and_tasks_are_counted_apart(dense: Stack, partition: str) -> None:
    client = tq.get_client()
    client.put(batch(0), partition_id=partition)
    for task in ("actor", "critic"):
        meta = client.get_meta(["input_ids"], 2, partition, task_name=task)
        assert client.get_data(meta)["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert client.reset_consumption(partition, "actor") is True
    assert not client.check_consumption_status("actor", partition)
    assert client.check_consumption_status("critic", partition)
