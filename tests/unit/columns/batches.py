"""Hypothesis strategies for rows and fields, and comparison of what came back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from transfer_queue.columns.tensor_bytes import DTYPES, tensor_to_bytes

FIELD_DTYPES = sorted(name for name in DTYPES if name != "complex32")  # torch warns whenever complex32 is touched


def same(left: Any, right: Any) -> bool:
    """Equal in type, dtype, shape and every bit."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            return False
        if left.is_nested or right.is_nested:
            return (
                left.layout == right.layout
                and left.dtype == right.dtype
                and len(left.unbind()) == len(right.unbind())
                and all(map(same, left.unbind(), right.unbind()))
            )
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and tensor_to_bytes(left, "left").tobytes() == tensor_to_bytes(right, "right").tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.dtype == object:
            return all(map(same, left.reshape(-1), right.reshape(-1)))
        return bool(left.tobytes() == right.tobytes())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


@st.composite
def tensors(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bytes (bool: of 0 and 1)."""
    item = DTYPES[dtype].itemsize
    count = math.prod(shape) * item
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(DTYPES[dtype]).view(shape) if count else torch.empty(shape, dtype=DTYPES[dtype])


sizes = st.integers(0, 4)


@st.composite
def dense_rows(draw: st.DrawFn, n: int) -> tuple[Any, list[Any]]:
    dtype = draw(st.sampled_from(FIELD_DTYPES))
    shape = tuple(draw(st.lists(sizes, max_size=3)))
    value = draw(tensors(dtype, (n, *shape)))
    return value, list(value.unbind()) if n else []


@st.composite
def ragged_rows(draw: st.DrawFn, n: int) -> tuple[Any, list[Any]]:
    """A jagged tensor, ragged along any axis, or a list of tensors ragged along any axes."""
    dtype = draw(st.sampled_from(FIELD_DTYPES))
    rank = draw(st.integers(1, 3))
    if draw(st.booleans()):
        lengths = draw(st.lists(sizes, min_size=n, max_size=n))
        rest = draw(st.lists(sizes, min_size=rank - 1, max_size=rank - 1))
        axis = draw(st.integers(0, rank - 1))
        values = draw(tensors(dtype, (sum(lengths), *rest)))
        offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64)
        nested = torch.nested.nested_tensor_from_jagged(values.movedim(0, axis), offsets, jagged_dim=axis + 1)
        return nested, list(nested.unbind())
    shapes = draw(st.lists(st.tuples(*[sizes] * rank), min_size=n, max_size=n))
    rows = [draw(tensors(dtype, shape)) for shape in shapes]
    return rows, rows


times = st.sampled_from([1, 1, 1, 1100])  # what is long takes another way than what is short
texts = st.builds(lambda text, times: text * times, st.text(st.characters(codec=None), max_size=12), times)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | texts | st.binary(max_size=9)
keys = texts | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.binary(max_size=3) | st.tuples(st.integers(0, 9))
arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.sampled_from(["<i8", ">f4", "?", "<c16", "<U5", "S3", "<M8[ms]"]),
    st.lists(sizes, max_size=3),
)
object_arrays = st.lists(scalars, max_size=3).map(lambda items: np.array([*items, None], object)[:-1])
numpy_scalars = st.sampled_from([np.float64(1.5), np.int8(-3), np.bool_(True), np.str_("é"), np.complex64(1j)])
special = (
    arrays
    | object_arrays
    | numpy_scalars
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from(FIELD_DTYPES).flatmap(lambda dtype: tensors(dtype, (2, 3)))
    | st.integers(2000, 9000).map(lambda n: np.arange(n))
    | st.integers(4000, 9000).map(bytes)
)
objects = st.recursive(
    scalars | special,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def python_rows(draw: st.DrawFn, n: int) -> tuple[Any, list[Any]]:
    element = draw(
        st.sampled_from([texts, texts | st.none(), texts.map(np.str_), st.integers(), st.booleans(), scalars, objects])
    )
    rows = draw(st.lists(element, min_size=n, max_size=n))
    return rows, rows


def fields(n: int) -> st.SearchStrategy[tuple[Any, list[Any]]]:
    """(what is put, its rows one by one)"""
    return dense_rows(n) | ragged_rows(n) | python_rows(n)
