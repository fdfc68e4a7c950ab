"""Helpers of 0.1.x for key-value clients."""

from __future__ import annotations

import pytest
import torch
from transfer_queue.utils.tensor_utils import (
    allocate_empty_tensors,
    compute_stride,
    get_nbytes,
    merge_contiguous_memory,
)


def test_tensors_of_a_dtype_share_an_allocation_in_order() -> None:
    dtypes, shapes = [torch.float32, torch.int64, torch.float32], [(2, 3), (), (4,)]
    tensors, addresses, regions, sizes = allocate_empty_tensors(dtypes, shapes)
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == list(zip(dtypes, shapes, strict=True))
    assert addresses == [regions[0], regions[1], regions[0] + 24]
    assert sizes == [40, 8]
    assert get_nbytes(dtypes, shapes) == [24, 8, 16]
    assert allocate_empty_tensors([], []) == ([], [], [], [])


def test_strides_and_regions() -> None:
    assert [compute_stride(shape) for shape in ((2, 3, 4), (5,), ())] == [(12, 4, 1), (1,), ()]
    assert merge_contiguous_memory([30, 0, 10, 100], [5, 10, 20, 1]) == ([0, 100], [35, 1])
    with pytest.raises(ValueError, match="same length"):
        merge_contiguous_memory([0], [])
