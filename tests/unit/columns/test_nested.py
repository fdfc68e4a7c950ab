"""Jagged tensors as they are built for results: the same as those of torch's public function, without its noise."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from transfer_queue.columns import nested


def built(values: torch.Tensor, axis: int, bounds: tuple[int, int]) -> Any:
    return nested.jagged(values, torch.tensor([0, 2, 2, 5]), axis, bounds)


def facts(tensor: Any) -> dict[str, Any]:
    """What code that takes a jagged tensor can see of it."""
    # The ragged size is a symbol that never equals another tensor's.
    ragged = tensor._ragged_idx
    return {
        "type": type(tensor),
        "layout": tensor.layout,
        "shape": [size for axis, size in enumerate(tensor.shape) if axis != ragged],
        "dims": tensor.dim(),
        "ragged": ragged,
        "contiguous": tensor.is_contiguous(),
        "leaf": tensor.is_leaf,
        "requires_grad": tensor.requires_grad,
        "lengths": tensor.lengths(),
        "extremes": (tensor._maybe_min_seqlen, tensor._maybe_max_seqlen),
        "numel": tensor.numel(),
        "values": tensor.values().tolist(),
        "rows": [row.tolist() for row in tensor.unbind()],
        "doubled": [row.tolist() for row in (tensor * 2).unbind()],
        "detached": [row.tolist() for row in tensor.detach().clone().unbind()],
        "pickled": [row.tolist() for row in pickle.loads(pickle.dumps(tensor)).unbind()],
    }


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_the_direct_construction_equals_the_public_one(
    axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nested._jagged_type() is not None, "this torch needs the public function"
    values = torch.arange(20).reshape(5, 4).to(dtype)
    direct = facts(built(values, axis, (0, 3)))
    monkeypatch.setattr(nested, "_jagged_type", lambda: None)
    assert direct == facts(built(values, axis, (0, 3)))


def test_a_result_shares_the_memory_it_was_made_of_and_can_be_trained_on() -> None:
    values = torch.arange(5.0)
    tensor = built(values, 1, (0, 3))
    values[0] = 9.0
    assert tensor.values()[0] == 9.0
    assert tensor.to_padded_tensor(-1.0).tolist() == [[9.0, 1.0, -1.0], [-1.0] * 3, [2.0, 3.0, 4.0]]
    leaf = tensor.requires_grad_()
    (leaf * 3).values().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.values().tolist() == [3.0] * 5


def test_a_result_can_be_saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save(built(torch.arange(5.0), 1, (0, 3)), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert [row.tolist() for row in loaded.unbind()] == [[0.0, 1.0], [], [2.0, 3.0, 4.0]]


_FIRST_JAGGED = """
import torch
from transfer_queue.columns.nested import jagged
print(jagged(torch.arange(3), torch.tensor([0, 1, 3]), 1, (1, 2)).unbind()[1].tolist())
"""


def test_the_first_jagged_tensor_of_a_process_logs_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_JAGGED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 2]"
    assert done.stderr == ""
