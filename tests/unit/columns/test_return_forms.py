"""The form each kind of value comes back in: container, layout, dtype and elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tensordict.utils import LinkedList

from tests.unit.columns.batches import FIELD_DTYPES, same
from transfer_queue.columns.block import BlockView
from transfer_queue.columns.nested import strided_nested
from transfer_queue.columns.tensors import Piece, decode, encode


def through(batch: Any, *, layout: Any = "jagged", rows: int | None = None) -> TensorDict:
    """``batch`` put and got."""
    block = encode(batch, rows=rows)
    view = BlockView(block.to_bytes())
    piece = Piece(view, None, None)
    return decode({schema.name: [piece] for schema in view.fields}, block.rows, view.fields, layout=layout)


def field(value: Any, n: int = 4, **options: Any) -> Any:
    return through(TensorDict({"f": value}, batch_size=[n]), **options).get("f")


def njt(rows: list[torch.Tensor], axis: int = 1) -> torch.Tensor:
    moved = [row.movedim(axis - 1, 0) for row in rows]
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in moved]).tolist()])
    return torch.nested.nested_tensor_from_jagged(torch.cat(moved).movedim(0, axis - 1), offsets, jagged_dim=axis)


def ragged(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
def test_a_dense_1d_column_is_dense(dtype: torch.dtype) -> None:
    put = torch.tensor([0, 1, 1, 0]).to(dtype)
    got = field(put)
    assert not got.is_nested
    assert same(got, put)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (4, 0), (4, 2, 3), (4, 2, 0), (4, 2, 3, 5)])
def test_a_dense_column_of_more_dimensions_is_jagged_along_axis_1(shape: tuple[int, ...]) -> None:
    put = torch.randn(shape)
    got = field(put)
    assert got.layout is torch.jagged
    assert got._ragged_idx == 1
    assert got.offsets().diff().tolist() == [shape[1]] * 4
    assert same(list(got.unbind()), list(put.unbind()))


def test_one_row_is_jagged_too() -> None:
    got = field(torch.randn(1, 3), n=1)
    assert got.layout is torch.jagged
    assert got.offsets().tolist() == [0, 3]


@pytest.mark.parametrize(
    ("rows", "axis"),
    [
        (ragged((3,), (1,), (2,), (5,)), 1),
        (ragged((2,), (2,), (2,), (2,)), 1),
        (ragged((0,), (3,), (0,), (1,)), 1),
        (ragged((0,), (0,), (0,), (0,)), 1),
        (ragged((3, 2), (1, 2), (2, 2), (5, 2)), 1),
        (ragged((2, 3), (2, 1), (2, 2), (2, 5)), 2),
        (ragged((3, 2, 4), (1, 2, 4), (0, 2, 4), (5, 2, 4)), 1),
    ],
)
@pytest.mark.parametrize("source", ["jagged", "strided", "stack", "one"])
def test_ragged_columns_are_jagged_along_their_axis(rows: list[torch.Tensor], axis: int, source: str) -> None:
    puts: dict[str, Callable[[], Any]] = {
        "jagged": lambda: njt(rows, axis),
        "strided": lambda: torch._nested_view_from_buffer(
            torch.cat([row.reshape(-1) for row in rows]),
            torch.tensor([row.shape for row in rows]),
            torch.tensor([row.stride() for row in rows]),
            torch.tensor([0, *np.cumsum([row.numel() for row in rows]).tolist()[:-1]]),
        ),
        "stack": lambda: NonTensorStack(*[NonTensorData(data=row) for row in rows]),
        "one": lambda: NonTensorData(data=rows, batch_size=[len(rows)]),
    }
    got = field(puts[source]())
    assert got.layout is torch.jagged
    assert got._ragged_idx == axis
    assert got.offsets().diff().tolist() == [row.shape[axis - 1] for row in rows]
    assert same(list(got.unbind()), rows)


def test_rows_ragged_in_two_axes_are_a_strided_nested_tensor() -> None:
    rows = ragged((3, 2), (1, 4), (0, 5), (2, 2))
    got = field(NonTensorStack(*[NonTensorData(data=row) for row in rows]))
    assert got.is_nested
    assert got.layout is torch.strided
    assert same(list(got.unbind()), rows)


def test_a_jagged_tensor_with_holes_keeps_its_rows() -> None:
    put = torch.nested.nested_tensor_from_jagged(
        torch.arange(12.0), torch.tensor([0, 3, 6, 9, 12]), lengths=torch.tensor([1, 3, 0, 2])
    )
    got = field(put)
    assert got.layout is torch.jagged
    assert [row.tolist() for row in got.unbind()] == [[0.0], [3.0, 4.0, 5.0], [], [9.0, 10.0]]


@pytest.mark.parametrize("name", FIELD_DTYPES)
def test_every_dtype_is_kept_bit_for_bit(name: str) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % (2 if name == "bool" else 255)
    put = raw.view(getattr(torch, name)).view(4, -1)
    assert same(field(put).values(), put.reshape(-1))
    assert same(field(put, layout="dense"), put)


def test_numbers_and_numeric_arrays_are_tensors() -> None:
    assert same(field([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]))
    assert same(field(np.array([1.0, 2, 3, 4])), torch.tensor([1.0, 2, 3, 4], dtype=torch.float64))
    assert field([[1, 2], [3, 4], [5, 6], [7, 8]]).layout is torch.jagged


@pytest.mark.parametrize(
    "values",
    [
        ["a", "béta", "", "日本"],
        [b"a", b"", b"\xff", bytes(9000)],
        [None, None, None, None],
        ["same", "same", "same", "same"],
        [1, None, "x", 2.5],
        [{"a": 1}, {}, {"b": [1, {"c": None}]}, {1: "int key", (1, 2): "tuple key"}],
        [[1, "a"], [], [[2]], ["b"]],
        [2**70, -(2**70), 2**63, 0],
        ["\ud800 lone", "b", None, "c"],
        [1j, complex("nan"), "x", None],
    ],
)
def test_values_are_a_list_like_column_of_one_entry_a_row(values: list[Any]) -> None:
    result = through(TensorDict({"f": NonTensorStack(*[NonTensorData(data=v) for v in values])}, batch_size=[4]))
    got = result["f"]
    assert isinstance(got, LinkedList)
    assert len(got) == 4
    assert repr(list(got)) == repr(got.tolist()) == repr([got[i] for i in range(4)]) == repr(values)
    assert type(result.get("f")) is NonTensorStack
    assert result.get("f").batch_size == torch.Size([4])


def test_tuples_become_lists() -> None:
    assert field(NonTensorStack((1, 2), ("a", (3,))), n=2).tolist() == [[1, 2], ["a", [3]]]


def test_string_arrays_come_back_as_numpy_strings() -> None:
    for put in (np.array(["a", "bé", "", "d"]), NonTensorStack(*np.array(["a", "bé", "", "d"]))):
        got = field(put)
        assert [type(value) for value in got.tolist()] == [np.str_] * 4
        assert got.tolist() == ["a", "bé", "", "d"]


def test_arrays_in_a_stack_stay_arrays() -> None:
    rows = [np.arange(3, dtype=np.int16), np.zeros((2, 2)), np.array(["x", None], object), np.float32([1])]
    got = field(NonTensorStack(*[NonTensorData(data=row) for row in rows]))
    assert same([member.data for member in got.tensordicts], rows)


def test_tensors_in_a_stack_are_a_tensor_column() -> None:
    assert same(field(NonTensorStack(*torch.arange(4.0))), torch.arange(4.0))
    assert field(NonTensorStack(*torch.zeros(4, 2))).layout is torch.jagged


def test_tensors_of_differing_dtype_or_rank_stay_separate_rows() -> None:
    rows = [torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(()), torch.zeros(1, 1)]
    got = field(NonTensorStack(*[NonTensorData(data=row) for row in rows]))
    assert type(got) is NonTensorStack
    assert same([member.data for member in got.tensordicts], rows)


def test_dicts_holding_tensors_keep_them() -> None:
    rows = [{"pixels": torch.randn(3, 2000), "grid": torch.tensor([1, 2]), "n": i} for i in range(4)]
    rows[2]["nested"] = njt(ragged((1,), (2000,)))
    got = field(NonTensorStack(*[NonTensorData(data=row) for row in rows]))
    assert same([member.data for member in got.tensordicts], rows)
    first = got.tensordicts[0].data["pixels"]
    first += 1
    assert not same(first, rows[0]["pixels"])


@pytest.mark.parametrize(
    "put",
    [
        torch.randn(4, 3, requires_grad=True),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(8, 3)[::2],
        torch.randn(4, 3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(4, 3)),
        torch.nn.Parameter(torch.randn(4, 3)),
    ],
    ids=["requires_grad", "transposed", "expanded", "strided", "conj", "neg", "parameter"],
)
def test_any_view_of_a_tensor_comes_back_plain(put: torch.Tensor) -> None:
    got = field(put, layout="dense")
    assert type(got) is torch.Tensor
    assert got.is_contiguous()
    assert not got.requires_grad
    assert torch.equal(got, put.detach())


def test_dense_layout_gives_dense_tensors_where_rows_are_equal_and_jagged_ones_where_not() -> None:
    equal, unequal = ragged((2, 3), (2, 3)), ragged((2, 3), (2, 4))
    for rows in (equal, unequal):
        got = field(njt(rows, axis=2), n=2, layout="dense")
        assert got.is_nested == (rows is unequal)
        assert same(list(got.unbind()), rows)


def test_returned_tensors_are_writable_and_independent() -> None:
    block = encode({"a": torch.zeros(4, 2), "b": torch.zeros(4)})
    view = BlockView(bytes(block.to_bytes()))
    piece = [Piece(view, None, None)]
    for _ in range(2):
        got = decode({"a": piece, "b": piece}, 4, view.fields)
        assert got["b"].sum() == got["a"].values().sum() == 0
        got["b"] += 1
        got["a"].values().add_(1)


def test_fields_of_equal_row_lengths_can_be_combined() -> None:
    lengths = [3, 0, 2, 4]
    got = through({name: [torch.ones(k) for k in lengths] for name in "ab"})
    assert (got["a"] + got["b"]).values().tolist() == [2.0] * 9


def test_zero_rows_keep_their_containers() -> None:
    got = through(
        TensorDict(
            {
                "d": torch.zeros(0),
                "m": torch.zeros(0, 3),
                "j": torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0])),
            },
            batch_size=[0],
        )
    )
    assert got.batch_size == torch.Size([0])
    assert got["d"].shape == (0,)
    assert got["m"].offsets().tolist() == [0]


def test_only_the_first_batch_dimension_counts() -> None:
    put = TensorDict({"t": torch.randn(3, 2, 4), "s": [["a", "b"], ["c", "d"], ["e", "f"]]}, batch_size=[3, 2])
    got = through(put)
    assert got.batch_size == torch.Size([3])
    assert got["t"].unbind()[0].shape == (2, 4)
    assert got["s"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_a_lazy_stack_of_rows_is_one_batch() -> None:
    rows = [TensorDict({"x": torch.randn(k), "s": f"row {k}"}, batch_size=[]) for k in (1, 3)]
    got = through(lazy_stack(rows))
    assert same(list(got["x"].unbind()), [row["x"] for row in rows])
    assert got["s"].tolist() == ["row 1", "row 3"]


def test_what_clients_call_on_a_result_works() -> None:
    got = through(TensorDict({"j": njt(ragged((1,), (3,), (2,), (0,))), "s": list("abcd")}, batch_size=[4]))
    assert got[0]["j"].shape == (1,)
    assert got[1]["s"] == "b"
    assert got["j"].to_padded_tensor(0.0).shape == (4, 3)
    assert got.select("j").to_padded_tensor()["j"].shape == (4, 3)
    assert got.pop("s").tolist() == list("abcd")


@pytest.mark.parametrize("layout", ["jagged", "dense"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_what_is_copied_to_a_device_column_by_column_equals_what_is_decoded_at_once(layout: Any, pieces: int) -> None:
    """The CPU as the device: the way is the same but for who copies."""
    lengths = [3, 1, 4, 1, 5, 2]
    batch = {
        "number": torch.arange(6),
        "dense": torch.randn(6, 2, 3),
        "half": torch.randn(6, 4).to(torch.bfloat16),
        "empty": torch.zeros(6, 0),
        "ragged": njt([torch.randn(length) for length in lengths]),
        "last": njt([torch.randn(2, length) for length in lengths], axis=2),
        "both": [torch.randn(length, 7 - length) for length in lengths],
        "text": [f"row {row}" for row in range(6)],
    }
    bounds = [6 * number // pieces for number in range(pieces + 1)]
    block = encode(batch)
    views = [BlockView(block.select(None, at).to_bytes()) for at in itertools.pairwise(bounds)]
    # The last rows first: pieces may come in any order.
    given = [Piece(view, None, at) for view, at in zip(views, itertools.pairwise(bounds), strict=True)][::-1]
    by_field = dict.fromkeys(batch, given)
    there = decode(by_field, 6, views[0].fields, layout=layout, copy=False, device=torch.device("cpu"))
    here = decode(by_field, 6, views[0].fields, layout=layout)
    assert there.get("text").tolist() == here.get("text").tolist() == batch.pop("text")
    for name in batch:
        assert same(there.get(name), here.get(name)), name


def test_what_is_changed_in_one_batch_shows_in_no_other() -> None:
    rows = ragged((3,), (5,))
    mine, other = field(njt(rows), 2), field(njt(rows), 2)
    mine.offsets().add_(1)
    mine.values().zero_()
    for later in (other, field(njt(rows), 2)):
        assert later.offsets().tolist() == [0, 3, 8]
        assert same(list(later.unbind()), rows)


def test_a_batch_that_was_read_in_inference_mode_can_be_trained_on_and_so_can_later_ones() -> None:
    rows = ragged((7,), (11,))
    with torch.inference_mode():
        read = field(njt(rows), 2)
    for batch in (read, field(njt(rows), 2)):
        weight = torch.ones(1, requires_grad=True)
        (batch * weight).values().sum().backward()
        assert weight.grad is not None
        assert torch.allclose(weight.grad, torch.cat(rows).sum())


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """What a program sets for its model: ``meta`` stands for a GPU."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_the_defaults_of_the_program_do_not_decide_device_and_dtype(request: pytest.FixtureRequest) -> None:
    nothing = [torch.empty(0), torch.empty(0)]
    strided = strided_nested([torch.ones(2, 3), torch.ones(1, 5)])
    batch = {
        "ragged": njt(nothing),
        "flat": torch.empty(2, 0),
        "objects": [{"t": torch.empty(0)}, {"t": strided}],
        "two axes": [torch.empty(0, 2), torch.empty(3, 0)],
    }
    block = encode(batch)
    request.getfixturevalue("other_defaults")
    view = BlockView(block.to_bytes())
    piece = Piece(view, None, None)
    found = decode({schema.name: [piece] for schema in view.fields}, 2, view.fields)
    objects = [entry["t"] for entry in found["objects"]]
    tensors = [found["ragged"], found["flat"], found["two axes"], *objects]
    assert [(tensor.device.type, tensor.dtype) for tensor in tensors] == [("cpu", torch.float32)] * 5
    assert [tuple(row.shape) for row in objects[1].unbind()] == [(2, 3), (1, 5)]
