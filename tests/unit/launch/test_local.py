"""A queue of this machine that cannot be started."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from transfer_queue.client import TransferQueueClient
from transfer_queue.config.processes import SamplerChoice
from transfer_queue.errors import ConfigError
from transfer_queue.launch.conf import merge_settings, plan_queue
from transfer_queue.launch.local import LocalStack, default_plan


def test_a_queue_that_cannot_be_started_leaves_no_folder() -> None:
    stack = LocalStack(default_plan(SamplerChoice(name="no.such.module:Sampler")))
    with pytest.raises(ConfigError):
        stack.start()
    assert not stack.directory.exists()


def test_units_without_a_limit_take_what_memory_is_free() -> None:
    plan = plan_queue(merge_settings({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    plan = replace(plan, units=tuple(unit.model_copy(update={"capacity": 1 << 20}) for unit in plan.units))
    rows = TensorDict({"x": torch.arange(8 << 20, dtype=torch.int32).reshape(4, -1)}, 4)
    with LocalStack(plan) as stack, closing(TransferQueueClient("c", stack.start().attach_config)) as client:
        stored = client.get_data(client.put(rows, partition_id="p"))["x"]
        assert torch.equal(torch.stack(list(stored.unbind())), rows["x"])
