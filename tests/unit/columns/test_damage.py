"""Damaged or hostile bytes give CorruptBlockError or a correct parse, never a crash or a large allocation."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.columns import batch_decode_from, batch_encode_into, unpack_from
from transfer_queue.columns.block import BlockView
from transfer_queue.columns.tensors import Piece, decode, encode
from transfer_queue.errors import CorruptBlockError, InvalidInputError, InvalidTypeError

BATCH: dict[str, Any] = {
    "dense": torch.randn(4, 3),
    "scalar": torch.arange(4),
    "empty": torch.zeros(4, 0),
    "ragged": [torch.randn(k, 2) for k in (1, 0, 3, 2)],
    "double": [torch.randn(k, k) for k in (1, 0, 3, 2)],
    "text": ["a", "bé", None, ""],
    "objects": [1, {"a": torch.zeros(2)}, np.arange(3), [2**70, b"x", 1j]],
    "framed": [np.arange(600), "x", b"y" * 5000, None],
}
LAYOUTS: tuple[Literal["jagged", "dense"], ...] = ("jagged", "dense")
GOOD = bytes(encode(BATCH, rows=4).to_bytes())


def read(data: bytes) -> None:
    """Everything a reader does with a block: parse, locate, select, decode."""
    view = BlockView(data)
    for name in [schema.name for schema in view.fields]:
        view.select([name], None).to_bytes()
        if view.rows >= 4:
            view.select([name], np.array([3, 0, 1])).to_bytes()
            piece = Piece(view, np.array([0, 3, 1, 2]), np.array([1, 0, 3, 2]))
            schema = next(schema for schema in view.fields if schema.name == name)
            decode({name: [piece]}, 4, [schema], allow_pickle=False)
            whole = Piece(view, (0, 4), None)
            for layout in LAYOUTS:
                decode({name: [whole]}, 4, [schema], layout=layout, copy=False, allow_pickle=False)


read(GOOD)  # imports on first use must not count in the peaks below


def survives(data: bytes) -> None:
    tracemalloc.start()
    try:
        read(data)
    # A flipped bit may turn an extension into "pickled", or name a dtype of the same size that is not asked for.
    except (CorruptBlockError, InvalidTypeError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=400, deadline=None)
def test_changed_bytes_anywhere(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    survives(bytes(data))


HEADER_END = 8 + int.from_bytes(GOOD[4:8], "little")


@given(st.lists(st.tuples(st.integers(0, HEADER_END), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=800, deadline=None)
def test_changed_bytes_in_the_header(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    survives(bytes(data))


@given(st.sampled_from(["ragged", "double", "text", "objects", "framed"]), st.data())
@settings(max_examples=300, deadline=None)
def test_changed_row_sizes(name: str, data: st.DataObject) -> None:
    block = encode({name: BATCH[name]}, rows=4).to_bytes()
    extents = BlockView(block).column(name).extents
    assert extents is not None
    position = data.draw(st.integers(0, extents.size - 1))
    extents.reshape(-1)[position] = data.draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 20))
    survives(bytes(block))


@given(st.integers(0, len(GOOD) - 1))
@settings(max_examples=200, deadline=None)
def test_truncated_blocks_are_refused(size: int) -> None:
    with pytest.raises(CorruptBlockError):
        BlockView(GOOD[:size])


def hostile(rows: int, data_bytes: int, *columns: list[Any]) -> bytes:
    header = msgspec.msgpack.encode([rows, data_bytes, list(columns)])
    start = -(-(8 + len(header)) // 64) * 64
    return (b"TQB1" + struct.pack("<I", len(header)) + header).ljust(start, b"\0") + bytes(min(data_bytes, 4096))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"TQB1",
        b"TQB1\xff\xff\xff\xff",
        b"TQB1\x05\x00\x00\x00\xdd\xff\xff\xff\xff",
        b"XXXX" + bytes(100),
        hostile(4, 2**62),
        hostile(4, 64, ["f", "dense", "float32", [2**62, 2**62], [[0, 64]]]),
        hostile(2**60, 64, ["f", "dense", "float32", [2], [[0, 64]]]),
        hostile(4, 64, ["f", "dense", "float32", [4], [[0, 128]]]),
        hostile(4, 64, ["f", "dense", "float32", [4], [[2**61, 64]]]),
        hostile(4, 64, ["f", "dense", "float32", [4], [[-64, 64]]]),
        hostile(4, 128, ["f", "dense", "float32", [4], [[32, 64]]]),
        hostile(4, 64, ["f", "dense", "float7", [4], [[0, 64]]]),
        hostile(4, 64, ["f", "dense", "float32", [None], [[0, 64]]]),
        hostile(4, 64, ["f", "dense", "float32", None, [[0, 64]]]),
        hostile(4, 64, ["f", "ragged", "float32", [4], [[0, 64], [0, 32]]]),
        hostile(2**59, 64, ["f", "ragged", "float32", [None], [[0, 64], [0, 64]]]),
        hostile(4, 64, ["f", "text", "int32", None, [[0, 0], [0, 32]]]),
        hostile(4, 64, ["f", "text", "str", None, [[0, 0]]]),
        hostile(4, 64, ["f", "sparse", "float32", [4], [[0, 64]]]),
        hostile(4, 64, ["f", "dense", "float32", [4], [[0, 64]]], ["f", "dense", "float32", [4], [[0, 64]]]),
    ],
)
def test_hostile_headers_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        BlockView(data)


def test_many_rows_without_bytes_allocate_nothing() -> None:
    tracemalloc.start()
    view = BlockView(hostile(2**60, 0, ["f", "dense", "float32", [0], [[0, 0]]]))
    assert view.select(None, (5, 2**50)).nbytes < 1024
    with pytest.raises(InvalidInputError):
        decode({"f": [Piece(view, None, None)]}, 4, view.fields)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


OBJECTS = [1, "text", {"a": torch.zeros(2000), "b": np.array([1j])}, torch.zeros(3, dtype=torch.bfloat16)]
PACKED = [bytes(b) for b in batch_encode_into(OBJECTS, lambda sizes: [bytearray(size) for size in sizes])[0]]


@given(st.integers(0, len(PACKED) - 1), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_packed_objects(number: int, data: st.DataObject) -> None:
    buffer = bytearray(PACKED[number])
    for _ in range(data.draw(st.integers(1, 3))):
        buffer[data.draw(st.integers(0, min(len(buffer), 200) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(0, len(buffer)) | st.just(len(buffer)))
    tracemalloc.start()
    try:
        batch_decode_from([buffer[:size]], allow_pickle=False)
    except (CorruptBlockError, InvalidTypeError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "buffer",
    [
        b"",
        bytes(7),
        struct.pack("<Q", 2**63),
        struct.pack("<QQQ", 1, 0, 1),
        struct.pack("<QQQ", 1, 24, 1),
        struct.pack("<QQQ", 1, 2**64 - 1, 1),
        struct.pack("<QQQ", 1, 24, 2**64 - 1),
        struct.pack("<QQQ", 2, 24, 0),
    ],
)
def test_packed_buffers_whose_table_does_not_fit_are_refused(buffer: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        unpack_from(buffer)
