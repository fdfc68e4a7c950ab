"""What cannot be stored is refused before anything is stored, with the field and the row named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from transfer_queue.client.kv import single_row
from transfer_queue.columns.block import BlockView, concatenate
from transfer_queue.columns.tensors import Piece, decode, encode
from transfer_queue.errors import (
    InvalidInputError,
    InvalidTypeError,
    StorageKeyNotFoundError,
    TransferQueueError,
    UnsupportedFieldError,
)


class Opaque:
    """Only pickle can store it."""

    def __init__(self, value: int) -> None:
        self.value = value


def stack(*values: Any) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(data=value) for value in values])


@pytest.mark.parametrize(
    ("batch", "rows", "error", "text"),
    [
        ({"f": torch.zeros(3)}, 4, InvalidInputError, "Inconsistent batch dimension: field 'f' has 3 rows, expected 4"),
        ({"f": [1, 2]}, 4, InvalidInputError, "Inconsistent batch dimension: field 'f' has 2 rows, expected 4"),
        ({"f": torch.zeros(3), "g": [1]}, None, InvalidInputError, "Inconsistent batch dimension: field 'g'"),
        ({"f": torch.zeros(())}, 1, InvalidInputError, "Inconsistent batch dimension: field 'f' has no row axis"),
        (
            TensorDict({"f": torch.zeros(3)}, [3]),
            4,
            InvalidInputError,
            r"Inconsistent batch dimension: batch size \[3\]",
        ),
        (TensorDict({"f": torch.zeros(3)}, []), None, InvalidInputError, r"batch size \[\]"),
        ({"f": torch.zeros(2, 2).to_sparse()}, 2, InvalidInputError, "field 'f': torch.sparse_coo"),
        ({"f": torch.zeros(2, device="meta")}, 2, InvalidInputError, "field 'f': a meta tensor"),
        ({"f": [torch.zeros(2), torch.zeros(2, device="meta")]}, 2, InvalidInputError, "field 'f', row 1: a meta"),
        ({"f": [torch.zeros(1), torch.zeros(1).to_sparse()]}, 2, InvalidInputError, "field 'f', row 1: torch.sparse"),
        ({"f": [{"t": torch.zeros(2, device="meta")}]}, 1, InvalidInputError, "field 'f', row 0: a meta tensor"),
        (
            {"f": torch.zeros(2), "": [1, 2]},
            2,
            InvalidInputError,
            "0 char",
        ),
        ({"n" * 256: torch.zeros(2)}, 2, InvalidInputError, "has 256 characters"),
        ({"n" * 10_000: torch.zeros(2)}, 2, InvalidInputError, "has 10000 characters"),
        ({"a\ud800": torch.zeros(2)}, 2, InvalidInputError, "not printable"),
        ({5: torch.zeros(2)}, 2, InvalidTypeError, "must be strings"),
        ({"f": 5}, 1, InvalidTypeError, "field 'f' is a int"),
        ({"f": "abc"}, 3, InvalidTypeError, "field 'f' is a str"),
        ({"f": NonTensorData(data="x", batch_size=[3])}, 3, InvalidTypeError, "one NonTensorData for the whole batch"),
        ({"f": TensorDict({"x": torch.zeros(3)}, [3])}, 3, UnsupportedFieldError, "nested TensorDict"),
        ({"f": stack(1, lambda: 0)}, 2, InvalidTypeError, "field 'f', row 1: a builtins.function can only be stored"),
        (
            {"f": [{"deep": [Opaque(1)]}]},
            1,
            InvalidTypeError,
            r"field 'f', row 0: a .*Opaque can only be stored by pick.*allow_pickle.*spec\.security\.allowPickle",
        ),
        ([torch.zeros(2)], 2, InvalidTypeError, "fields must be a TensorDict or a mapping"),
        ({}, None, InvalidInputError, "with an entry a row"),
    ],
)
def test_bad_batches_are_refused(batch: Any, rows: int | None, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        encode(batch, rows=rows, allow_pickle=False)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidTypeError, match="field 'f', row 0: nested too deeply"):
        encode({"f": [loop]}, rows=1)


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="field 'f', row 0: a lock cannot be pickled"):
        encode({"f": [threading.Lock()]}, rows=1)


def test_bit_tensors_are_refused() -> None:
    bits = torch.empty(2, dtype=torch.bits8)
    with pytest.raises(InvalidInputError, match=r"dtype torch\.bits8 cannot be stored"):
        encode({"f": bits})


def test_opaque_values_need_pickle_on_both_sides() -> None:
    view = BlockView(encode({"f": [Opaque(7), {1, 2}]}, rows=2).to_bytes())
    piece = [Piece(view, None, None)]
    got = decode({"f": piece}, 2, view.fields)["f"]
    assert got[0].value == 7
    assert got[1] == {1, 2}
    with pytest.raises(InvalidTypeError, match=r"unpickling is off here.*spec\.security\.allowPickle"):
        decode({"f": piece}, 2, view.fields, allow_pickle=False)


@pytest.mark.parametrize(
    "rows", [(-1, 2), (0, 5), (3, 2), np.array([4]), np.array([-1]), np.array([0.5]), np.zeros((1, 1), int)]
)
def test_rows_outside_a_block_are_refused(rows: Any) -> None:
    view = BlockView(encode({"f": torch.zeros(4)}).to_bytes())
    with pytest.raises(InvalidInputError):
        view.select(None, rows)


def test_unknown_fields_are_named_with_the_known_ones() -> None:
    view = BlockView(encode({"f": torch.zeros(4)}).to_bytes())
    with pytest.raises(StorageKeyNotFoundError, match=r"'g' is not in the block, which has \['f'\]"):
        view.select(["g"], None)


@pytest.mark.parametrize(
    "positions",
    [[(0, 2)], [(0, 2), (1, 3)], [(0, 3), (2, 4)], [np.array([0, 0, 1, 2])], [(0, 5)], [np.array([0, 1, 2, 7])]],
)
def test_pieces_must_cover_each_row_once(positions: list[Any]) -> None:
    view = BlockView(encode({"f": torch.zeros(8)}).to_bytes())
    counts = [p[1] - p[0] if isinstance(p, tuple) else len(p) for p in positions]
    pieces = [Piece(view, (0, count), position) for count, position in zip(counts, positions, strict=True)]
    with pytest.raises(InvalidInputError):
        decode({"f": pieces}, 4, view.fields)


@pytest.mark.parametrize(
    "other", [{"g": torch.zeros(2)}, {"f": torch.zeros(2, 1)}, {"f": torch.zeros(2).int()}, {"f": ["a"]}]
)
def test_blocks_of_differing_fields_do_not_concatenate(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot be concatenated"):
        concatenate([encode({"f": torch.zeros(2)}), encode(other)])


@pytest.mark.parametrize("target", [bytearray(10), bytes(4096)])
def test_a_block_is_not_written_into_a_buffer_that_is_too_small_or_read_only(target: Any) -> None:
    with pytest.raises(InvalidInputError, match="needs a writable buffer"):
        encode({"f": torch.zeros(4)}).write_into(target)


def test_refusals_are_catchable_as_builtin_errors() -> None:
    assert issubclass(InvalidInputError, (TransferQueueError, ValueError))
    assert issubclass(UnsupportedFieldError, RuntimeError)
    assert issubclass(UnsupportedFieldError, TypeError)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 3)


@pytest.fixture
def distributed() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed_tensor() -> torch.Tensor:
    mesh = DeviceMesh("cpu", torch.arange(1))
    return DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate()])


KINDS: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: torch.eye(2).to_sparse_csr(), r"torch.sparse_csr tensors.*to_dense"),
    (lambda: torch.eye(2).to_mkldnn(), r"torch._mkldnn tensors.*to_dense"),
    (fake, r"a FakeTensor.*outside of FakeTensorMode"),
    (distributed_tensor, r"a DTensor.*to_local\(\).*full_tensor\(\)"),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.usefixtures("distributed")
@pytest.mark.parametrize(("make", "text"), KINDS, ids=["csr", "mkldnn", "fake", "DTensor"])
@pytest.mark.parametrize("form", ["column", "rows", "inside an object"])
def test_tensors_without_plain_memory_are_refused_by_field_and_kind(
    make: Callable[[], torch.Tensor], text: str, form: str
) -> None:
    value = make()
    batches = {"column": value, "rows": [value, value], "inside an object": [{"t": value}, 1]}
    with pytest.raises(InvalidInputError, match=f"field 'f'.*{text}"):
        encode({"f": batches[form]})
    if form == "column":
        with pytest.raises(InvalidInputError, match=f"field 'f'.*{text}"):
            single_row({"f": value})


def test_stacks_of_uneven_parts_are_refused_by_field() -> None:
    parts = TensorDict({"f": torch.ones(2, 3)}, [2]), TensorDict({"f": torch.ones(2, 4)}, [2])
    with pytest.raises(UnsupportedFieldError, match=r"field 'f'.*dimension 1.*\[\[2, 3\], \[2, 4\]\].*pad"):
        encode(LazyStackedTensorDict(*parts, stack_dim=1))
    lacking = TensorDict({"f": torch.ones(2, 3), "g": torch.ones(2)}, [2])
    with pytest.raises(InvalidInputError, match="field 'g' is missing in some parts"):
        encode(LazyStackedTensorDict(parts[0], lacking, stack_dim=1))


def test_a_tensor_within_vmap_is_refused_by_its_name() -> None:
    def put(row: torch.Tensor) -> torch.Tensor:
        encode({"x": row.unsqueeze(0)})
        return row

    with pytest.raises(InvalidInputError, match=r"field 'x': a tensor within torch.vmap.*call put outside"):
        torch.vmap(put)(torch.ones(2, 3))
