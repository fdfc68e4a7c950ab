"""A queue of this machine that cannot be started."""

from __future__ import annotations

import pytest

from transfer_queue.config.processes import SamplerChoice
from transfer_queue.errors import ConfigError
from transfer_queue.launch.local import LocalStack, default_plan


def test_a_queue_that_cannot_be_started_leaves_no_folder() -> None:
    stack = LocalStack(default_plan(SamplerChoice(name="no.such.module:Sampler")))
    with pytest.raises(ConfigError):
        stack.start()
    assert not stack.directory.exists()
