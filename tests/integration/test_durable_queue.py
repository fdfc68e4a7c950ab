"""A durable queue of one machine goes on where its last run ended."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from transfer_queue.config import resource
from transfer_queue.launch import local
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import LocalPlan, plan_local


@pytest.fixture
def plan() -> Iterator[LocalPlan]:
    name = f"durable-{uuid.uuid4().hex[:8]}"
    document = {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueue",
        "metadata": {"name": name},
        "spec": {
            "backend": {"simple": {}},
            "controller": {"durability": "process"},
            "storage": {"replicas": 1, "capacity": "16Mi"},
        },
    }
    planned = plan_local(resource.parse(document))
    free = {"port": 0, "metrics_port": 0}
    yield LocalPlan(
        name,
        planned.controller.model_copy(update=free),
        tuple(unit.model_copy(update=free) for unit in planned.units),
    )
    for folder in local.SHARED_MEMORY.glob(f"transferqueue-*/{name}"):
        shutil.rmtree(folder)


def test_rows_of_the_last_run_are_there_in_the_next(plan: LocalPlan, tmp_path: Path) -> None:
    with preloaded.servers(), LocalStack(plan, tmp_path).start() as stack:
        client = tq.TransferQueueClient("first", stack.controller_address)
        meta = client.put(TensorDict({"x": torch.arange(8.0).view(2, 4)}, batch_size=[2]), partition_id="p")
        client.close()
    with preloaded.servers(), LocalStack(plan, tmp_path).start() as stack:
        client = tq.TransferQueueClient("second", stack.controller_address)
        assert torch.equal(client.get_data(meta)["x"].values().view(2, 4), torch.arange(8.0).view(2, 4))
        client.close()
