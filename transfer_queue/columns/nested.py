"""Nested tensors taken apart and put together, in torch's jagged and strided layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

__all__ = ["checked_jagged", "jagged", "jagged_parts", "strided_nested", "strided_nested_from_buffer"]


def jagged_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """``(values, offsets, ragged axis)`` of a jagged tensor without holes between rows; None for any other.

    ``values`` has the ragged axis first and is contiguous exactly as far as the source is; ``offsets`` is int64
    ``(rows + 1,)`` on the CPU, starting at 0. The ragged axis counts from the batch axis, so it is at least 1.
    """
    source: Any = tensor
    if tensor.layout is not torch.jagged or source.lengths() is not None:
        return None
    axis: int = source._ragged_idx
    offsets = source.offsets().detach().cpu().to(torch.int64)
    values: torch.Tensor = source.values().detach().movedim(axis - 1, 0)
    first, last = int(offsets[0]), int(offsets[-1])
    return values[first:last], offsets - first, axis


def jagged(values: torch.Tensor, offsets: torch.Tensor, axis: int, bounds: tuple[int, int]) -> torch.Tensor:
    """The jagged tensor of ``values`` (ragged axis first), whose rows are split at ``offsets`` along ``axis``.

    ``bounds``: the shortest and the longest row. Without them, padding would go to the length of all rows together.
    """
    values = values.movedim(0, axis - 1) if axis > 1 else values
    build = _jagged_type()
    if build is None:
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, jagged_dim=axis, min_seqlen=bounds[0], max_seqlen=bounds[1]
        )
    built: Any = build(values, offsets, _ragged_idx=axis)
    # Not given to the constructor, which would mark them as dynamic each time, at a quarter of the whole cost.
    built._metadata_cache = {"min_seqlen": _length(bounds[0]), "max_seqlen": _length(bounds[1])}
    return built  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _length(size: int) -> torch.Tensor:
    """torch keeps the two lengths as the sizes of tensors without elements, which vary between batches."""
    with torch.inference_mode(False):  # batches for training share it
        length = torch.zeros(size, 0, dtype=torch.float32, device="cpu")
        torch._dynamo.mark_dynamic(length, 0)
    return length


@lru_cache(maxsize=1)
def _jagged_type() -> Callable[..., torch.Tensor] | None:
    """torch's class of jagged tensors, if it can be built as pickle and tensordict build it.

    The public function makes the same tensor as a view, through several dispatches that cost five times as much, and
    it logs a warning about tracing in each process. None: this torch wants the public function.
    """
    try:
        from torch.nested._internal.nested_tensor import NestedTensor

        values, offsets = (
            torch.arange(3, device="cpu", dtype=torch.int64),
            torch.tensor([0, 1, 3], device="cpu", dtype=torch.int64),
        )
        lengths = {"min_seqlen": _length(1), "max_seqlen": _length(2)}
        trial: Any = NestedTensor(values, offsets, _ragged_idx=1, _metadata_cache=lengths)
        found = [row.tolist() for row in trial.unbind()], trial._get_min_seqlen(), trial._get_max_seqlen()
    except (ImportError, AttributeError, TypeError, RuntimeError, AssertionError):
        return None
    same = found == ([[0], [1, 2]], 1, 2) and trial.offsets() is offsets
    return NestedTensor if same and trial.layout is torch.jagged else None


def checked_jagged(values: Any, offsets: Any, axis: Any) -> torch.Tensor:
    """``jagged`` for parts that were read from bytes. Raises ValueError unless they fit each other."""
    fits = (
        isinstance(values, torch.Tensor)
        and isinstance(offsets, torch.Tensor)
        and type(axis) is int
        and 1 <= axis <= values.dim()
        and offsets.dtype == torch.int64
        and offsets.dim() == 1
        and len(offsets) > 0
        and int(offsets[0]) == 0
        and int(offsets[-1]) == len(values)
        and bool((offsets.diff() >= 0).all())
    )
    if not fits:
        raise ValueError("parts of a jagged tensor do not fit each other")
    lengths = offsets.diff().tolist()
    return jagged(values, offsets, axis, (min(lengths, default=0), max(lengths, default=0)))


def strided_nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """A nested tensor in strided layout of ``rows``, which have one dtype and rank and any shapes; copies them."""
    if not rows:
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return strided_nested_from_buffer(nothing, torch.empty(0, 0, dtype=torch.int64, device="cpu"))
    sizes = torch.tensor([row.shape for row in rows], dtype=torch.int64, device="cpu")
    shapes = sizes.reshape(len(rows), rows[0].dim())
    return strided_nested_from_buffer(torch.cat([row.reshape(-1) for row in rows]), shapes)


def strided_nested_from_buffer(buffer: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    """The same from a flat ``buffer`` of all rows' elements and int64 ``(rows, rank)`` ``shapes``; copies nothing.

    torch's public constructor lacks many dtypes and converts row by row, hence the internal one.
    """
    strides = torch.ones_like(shapes)
    for axis in range(shapes.shape[1] - 2, -1, -1):
        strides[:, axis] = strides[:, axis + 1] * shapes[:, axis + 1].clamp(min=1)
    sizes = shapes.prod(dim=1)
    starts = sizes.cumsum(0) - sizes
    build: Any = torch._nested_view_from_buffer
    nested: torch.Tensor = build(buffer, shapes, strides, starts)
    return nested
