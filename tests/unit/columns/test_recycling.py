"""Decoded batches get memory that earlier batches gave back, and never memory that is in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.columns import recycling
from transfer_queue.columns.recycling import LARGE_BYTES, RecycledMemory


def test_memory_is_given_back_when_the_last_tensor_on_it_is_gone() -> None:
    memory = RecycledMemory()
    taken = memory.take(LARGE_BYTES)
    address = taken.ctypes.data
    tensor = torch.from_numpy(taken[64:]).view(torch.float32)[3:]
    del taken
    assert memory.idle_bytes == 0
    del tensor
    assert memory.idle_bytes == LARGE_BYTES
    assert memory.take(LARGE_BYTES).ctypes.data == address


def test_no_more_than_the_limit_is_kept() -> None:
    memory = RecycledMemory(3 * LARGE_BYTES)
    taken = [memory.take(LARGE_BYTES) for _ in range(8)]
    assert memory.idle_bytes == 0
    del taken
    assert memory.idle_bytes == 3 * LARGE_BYTES


def test_buffers_beyond_the_limit_are_not_kept() -> None:
    memory = RecycledMemory(LARGE_BYTES)
    del [memory.take(2 * LARGE_BYTES)][0]
    assert memory.idle_bytes == 0


def test_what_no_batch_needs_is_freed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recycling, "monotonic", lambda: now[0])
    memory = RecycledMemory()
    del [[memory.take(LARGE_BYTES) for _ in range(4)]][0]  # a moment with four batches at once
    assert memory.idle_bytes == 4 * LARGE_BYTES
    for _ in range(2):
        now[0] += 0.9 * recycling.RETAIN_S
        del [memory.take(LARGE_BYTES)][0]
    assert memory.idle_bytes == LARGE_BYTES


@given(st.lists(st.tuples(st.integers(1, 6 * LARGE_BYTES), st.booleans()), max_size=20))
@settings(max_examples=50, deadline=None)
def test_memory_in_use_never_overlaps(steps: list[tuple[int, bool]]) -> None:
    memory = RecycledMemory(8 * LARGE_BYTES)
    held: list[np.ndarray] = []
    for nbytes, drop in steps:
        if drop and held:
            held.pop(0)
        taken = memory.take(nbytes)
        assert taken.nbytes == nbytes
        assert not any(np.shares_memory(taken, other) for other in held)
        held.append(taken)
