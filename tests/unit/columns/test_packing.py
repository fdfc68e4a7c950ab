"""The packed-buffer path: encoding into the caller's buffers and decoding are inverses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.columns.batches import objects, same
from transfer_queue.columns import batch_decode_from, batch_encode_into, calc_packed_size, pack_into, unpack_from
from transfer_queue.errors import InvalidInputError, InvalidTypeError

Alloc = Callable[[list[int]], list[Any]]


def separate(sizes: list[int]) -> list[Any]:
    return [bytearray(size) for size in sizes]


def slices_of_one(sizes: list[int]) -> list[Any]:
    whole = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum(sizes).tolist()
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def larger_views(sizes: list[int]) -> list[Any]:
    return [memoryview(bytearray(b"\xff" * (size + 100))) for size in sizes]


@pytest.mark.parametrize("alloc", [separate, slices_of_one, larger_views])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_decoding_inverts_encoding_of_every_kind(alloc: Alloc, workers: int) -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(6, 2), torch.tensor([0, 2, 2, 6]))
    objs = [
        torch.arange(10, dtype=torch.float32),
        torch.randn(2, 3, 4, 5, 6),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor(2.5),
        jagged,
        jagged.transpose(1, 2),
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 5)], layout=torch.strided),
        {"pixel_values": torch.randn(300, 40), "image_grid_thw": torch.tensor([[1, 2, 3]]), "name": "é"},
        np.arange(5000).reshape(50, 100),
        [b"raw", None, True, 2**80, {(1, 2): -0.0}],
        {"\ud800": [1], 2**80: None},  # keys that msgpack cannot hold
        b"z" * 10_000,
        torch.arange(3 << 20),  # large enough in total for the workers to be used
    ]
    buffers, sizes = batch_encode_into(objs, alloc, num_workers=workers)
    assert [len(memoryview(buffer)) >= size for buffer, size in zip(buffers, sizes, strict=True)] == [True] * len(objs)
    assert same(batch_decode_from(buffers), objs)


@given(st.lists(objects, max_size=5))
@settings(max_examples=200, deadline=None)
def test_decoding_inverts_encoding(objs: list[Any]) -> None:
    buffers, _ = batch_encode_into(objs, separate, allow_pickle=False)
    assert same(batch_decode_from(buffers, allow_pickle=False), objs)


def test_what_is_decoded_outlives_its_buffer() -> None:
    (buffer,), _ = batch_encode_into([{"t": torch.ones(5000), "a": np.ones(3)}], separate)
    (decoded,) = batch_decode_from([buffer])
    buffer[:] = bytes(len(buffer))
    assert decoded["t"].sum() == 5000
    decoded["t"] += 1
    decoded["a"] += 1


def test_buffers_may_be_tensors() -> None:
    buffers, sizes = batch_encode_into(
        [{"t": torch.arange(9)}], lambda sizes: [torch.empty(sizes[0], dtype=torch.uint8)]
    )
    assert buffers[0].shape == (sizes[0],)
    (found,) = batch_decode_from(source_buffers=buffers)
    assert found["t"].tolist() == list(range(9))


def test_the_allocator_is_asked_once_with_the_size_of_each_object() -> None:
    asked: list[list[int]] = []

    def alloc(sizes: list[int]) -> list[bytearray]:
        asked.append(sizes)
        return [bytearray(size) for size in sizes]

    _, sizes = batch_encode_into(["a", torch.zeros(5000)], alloc)
    assert asked == [sizes]
    assert sizes[0] < 64
    assert 20_000 < sizes[1] < 20_200


@pytest.mark.parametrize(
    "alloc", [lambda sizes: [], lambda sizes: [bytearray(3) for _ in sizes], lambda sizes: [bytes(n) for n in sizes]]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_unusable_buffers_are_refused(alloc: Alloc, workers: int) -> None:
    with pytest.raises(InvalidInputError, match="buffer"):
        batch_encode_into([torch.zeros(3 << 20), torch.zeros(3 << 20)], alloc, num_workers=workers)


def test_objects_that_need_pickle_are_refused_without_it() -> None:
    with pytest.raises(InvalidTypeError, match=r"object 1: a builtins\.set can only be stored by pickling"):
        batch_encode_into([1, {2}], separate, allow_pickle=False)
    assert batch_decode_from(batch_encode_into([1, {2}], separate)[0]) == [1, {2}]


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(0, 9))
def test_unpacking_inverts_packing(items: list[bytes], spare: int) -> None:
    target = bytearray(calc_packed_size(items) + spare)
    pack_into(target, items)
    assert [bytes(item) for item in unpack_from(target)] == items


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_packing_needs_the_calculated_size(items: list[bytes]) -> None:
    with pytest.raises(InvalidInputError, match="need a writable buffer of"):
        pack_into(bytearray(calc_packed_size(items) - 1), items)
