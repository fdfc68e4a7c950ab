"""Servers handle blocks without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "transfer_queue.columns",
        "transfer_queue.columns.block",
        "transfer_queue.metadata",
        "transfer_queue.storage.memory.arena",
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'tensordict')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_put_of_plain_tensors_loads_no_tensordict() -> None:
    code = (
        "import sys, torch; from transfer_queue.client.kv import single_row; "
        "from transfer_queue.columns.encoding import encode; "
        "encode(single_row({'x': torch.ones(3), 'text': 'abc'}), rows=1); "
        "print([m for m in sys.modules if m in ('tensordict', 'torch._dynamo')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
