"""Whatever is put comes back: encode, write, view, select, decode."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack

from tests.unit.columns.batches import fields, same
from transfer_queue.columns.block import BlockView, concatenate
from transfer_queue.columns.tensors import Piece, decode, encode, split


def rows_of(value: Any) -> list[Any]:
    """The rows of a field of a decoded batch."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.size(0) else []
    if isinstance(value, NonTensorStack):
        return [member.data for member in value.tensordicts]
    return list(value.data)


def view_of(batch: dict[str, Any], n: int) -> BlockView:
    return BlockView(encode(batch, rows=n).to_bytes())


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, dict[str, Any], dict[str, list[Any]]]:
    n = draw(st.integers(0, 6))
    drawn = draw(st.lists(fields(n), min_size=1, max_size=3))
    batch = {f"f{number}": put for number, (put, _) in enumerate(drawn)}
    return n, batch, {f"f{number}": rows for number, (_, rows) in enumerate(drawn)}


@given(batches())
@settings(max_examples=300, deadline=None)
def test_segments_and_write_into_give_the_same_block(case: tuple[int, dict[str, Any], dict[str, list[Any]]]) -> None:
    n, batch, _ = case
    block = encode(batch, rows=n)
    target = bytearray(b"\xff" * (block.nbytes + 70))
    block.write_into(target)
    assert b"".join(block.segments()) == target[: block.nbytes]
    assert target[block.nbytes :] == b"\xff" * 70
    view = BlockView(target)
    assert (view.rows, view.fields, view.nbytes) == (n, block.fields, block.nbytes)
    assert block.nbytes % 64 == 0


@given(batches(), st.data(), st.sampled_from(["jagged", "dense"]), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_rows_of_any_blocks_come_back_as_put(
    case: tuple[int, dict[str, Any], dict[str, list[Any]]], data: st.DataObject, layout: Any, copy: bool
) -> None:
    n, batch, rows = case
    view = view_of(batch, n)
    wanted = data.draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []
    cut = data.draw(st.integers(0, len(wanted)))
    first, second = np.array(wanted[:cut], np.int64), np.array(wanted[cut:], np.int64)
    sub = BlockView(view.select(None, second).to_bytes())
    order = data.draw(st.permutations(range(len(wanted))))
    places = np.array(order, np.int64)
    pieces = [Piece(view, first, places[:cut]), Piece(sub, None, places[cut:])]
    result = decode(dict.fromkeys(batch, pieces), len(wanted), view.fields, layout=layout, copy=copy)
    assert list(result.batch_size) == [len(wanted)]
    for name in batch:
        expected = [rows[name][wanted[order.index(position)]] for position in range(len(wanted))]
        assert same(rows_of(result.get(name)), expected)


@given(batches(), st.data())
@settings(max_examples=200, deadline=None)
def test_split_blocks_concatenate_to_the_whole(
    case: tuple[int, dict[str, Any], dict[str, list[Any]]], data: st.DataObject
) -> None:
    n, batch, _ = case
    block = encode(batch, rows=n)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, n], strict=True))
    parts = split(block, bounds)
    assert [part.rows for part in parts] == [stop - start for start, stop in bounds]
    assert concatenate([BlockView(part.to_bytes()) for part in parts]).to_bytes() == block.to_bytes()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_fields_written_in_differing_forms_come_back_row_by_row(data: st.DataObject) -> None:
    drawn = [data.draw(fields(n)) for n in data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))]
    rows = [row for _, part in drawn for row in part]
    pieces, position = [], 0
    for put, part in drawn:
        pieces.append(Piece(view_of({"f": put}, len(part)), None, (position, position + len(part))))
        position += len(part)
    result = decode({"f": pieces}, len(rows), pieces[0].view.fields)
    assert same(rows_of(result.get("f")), rows)


@pytest.mark.parametrize("n", [1, 1024])
def test_one_row_blocks_assemble_into_one_batch(n: int) -> None:
    rows = [{"d": torch.full((1, 3), i), "s": [f"row {i}"], "r": [torch.arange(i % 5)]} for i in range(n)]
    views = [view_of(row, 1) for row in rows]
    pieces = [Piece(view, None, (i, i + 1)) for i, view in enumerate(views)]
    result = decode(dict.fromkeys("dsr", pieces), n, views[0].fields)
    assert same(result.get("d").values().view(n, 3), torch.arange(n).view(n, 1).expand(n, 3).contiguous())
    assert result["s"].tolist() == [f"row {i}" for i in range(n)]
    assert result.get("r").offsets().diff().tolist() == [i % 5 for i in range(n)]


def test_without_copy_a_whole_column_is_a_view_of_the_block() -> None:
    memory = np.zeros(1 << 12, np.uint8)
    block = encode({"d": torch.zeros(4, 8)})
    block.write_into(memory)
    view = BlockView(memory)
    shared = decode({"d": [Piece(view, None, None)]}, 4, view.fields, layout="dense", copy=False)
    fresh = decode({"d": [Piece(view, None, None)]}, 4, view.fields, layout="dense")
    view.column("d").values[:4] = 255
    assert shared["d"][0, 0].isnan()
    assert fresh["d"].sum() == 0
    fresh["d"] += 1
    assert view.column("d").values[4:].sum() == 0


def test_encoding_refers_to_the_tensors_and_copies_nothing() -> None:
    tensor = torch.zeros(1000, 100)
    block = encode({"d": tensor})
    tensor += 1
    assert any(segment.nbytes == tensor.nbytes for segment in block.segments())
    view = BlockView(block.to_bytes())
    assert (view.column("d").values.view(np.float32) == 1).all()


def test_lengths_are_those_along_the_first_ragged_axis() -> None:
    block = encode({"r": [torch.zeros(2, n) for n in (3, 0, 5)], "m": [torch.zeros(n, n) for n in (1, 0, 2)]})
    lengths = {name: np.frombuffer(raw, "<i4").tolist() for name, raw in block.lengths.items()}
    assert lengths == {"r": [3, 0, 5], "m": [1, 0, 2]}


def test_long_ascii_strings_are_not_copied_until_they_are_written() -> None:
    texts = [chr(97 + row) * 1_000_000 for row in range(8)]
    tracemalloc.start()
    try:
        block = encode({"text": texts}, rows=8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000
    del texts
    gc.collect()
    view = BlockView(block.to_bytes())  # the block kept them
    got = decode({"text": [Piece(view, np.array([5, 2]), None)]}, 2, view.fields)["text"]
    assert list(got) == ["f" * 1_000_000, "c" * 1_000_000]


def test_picked_long_rows_are_read_from_where_they_lie() -> None:
    rows = [{"text": "x" * 300_000, "n": n} for n in range(20)]
    texts, images = [chr(97 + row) * 300_000 for row in range(20)], [bytes([n]) * 300_000 for n in range(20)]
    view = view_of({"text": texts, "image": images, "document": rows}, 20)
    pieces = [Piece(view, np.array([7, 3]), None)]
    tracemalloc.start()
    try:
        got = decode({"text": pieces, "image": pieces, "document": pieces}, 2, view.fields)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5e6  # 1.8 MB are the values themselves
    assert list(got["text"]) == ["h" * 300_000, "d" * 300_000]
    assert [image[0] for image in got["image"]] == [7, 3]
    assert [document["n"] for document in got["document"]] == [7, 3]
