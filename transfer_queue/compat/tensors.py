"""Helpers for users' key-value clients that receive tensors into registered memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from transfer_queue.errors import InvalidInputError

__all__ = ["allocate_empty_tensors", "compute_stride", "get_nbytes", "merge_contiguous_memory"]


def allocate_empty_tensors(
    dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], list[int], list[int], list[int]]:
    """Allocate tensors of these dtypes and shapes; the tensors of one dtype share one allocation, in order.

    Returns:
        The tensors, the address of each, the address of each allocation, and its size in bytes. Allocations are in the
        order in which their dtypes appear.
    """
    counts = [math.prod(shape) for shape in shapes]
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    regions = []
    for dtype in dict.fromkeys(dtypes):
        sizes = [count for count, kind in zip(counts, dtypes, strict=True) if kind == dtype]
        region = torch.empty(sum(sizes), dtype=dtype)
        regions.append(region)
        ends = accumulate(sizes)
        flat[dtype] = [region[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    tensors = [flat[dtype].pop(0).view(tuple(shape)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    return tensors, addresses, [region.data_ptr() for region in regions], [region.nbytes for region in regions]


def compute_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def get_nbytes(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Size in bytes of a tensor of each dtype and shape."""
    return [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]


def merge_contiguous_memory(ptrs: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge adjacent regions of memory; return their addresses, in rising order, and their sizes in bytes.

    Raises:
        InvalidInputError: a ValueError, if the numbers of sizes and addresses differ.
    """
    if len(ptrs) != len(sizes):
        raise InvalidInputError(f"ptrs and sizes must have the same length, not {len(ptrs)} and {len(sizes)}")
    merged: list[list[int]] = []
    for ptr, size in sorted(zip(ptrs, sizes, strict=True)):
        if merged and sum(merged[-1]) == ptr:
            merged[-1][1] += size
        else:
            merged.append([ptr, size])
    return [ptr for ptr, _ in merged], [size for _, size in merged]
