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
