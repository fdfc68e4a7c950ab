from __future__ import annotations

import numpy as np
import pytest
import torch

from transfer_queue.columns.block import BlockView, EncodedBlock
from transfer_queue.columns.tensors import encode
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.base import BlockRead, UnitInfo
from transfer_queue.storage.mooncake.parts import HEADER_BYTES, Part, overlaps, wanted_ranges

UNIT = UnitInfo(0, "u", "", 1)
ROWS = 50


@pytest.fixture(scope="module")
def block() -> EncodedBlock:
    ragged = [torch.arange(row % 7) for row in range(ROWS)]
    return encode(
        {
            "large": torch.randn(ROWS, 20_000),
            "dense": torch.randn(ROWS, 3),
            "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "text": [f"text {row}" for row in range(ROWS)],
            "object": [{"row": row} for row in range(ROWS)],
            "other": torch.randn(ROWS, 30_000),
        }
    )


READS = [
    (["dense"], None),
    (["dense", "text"], (3, 20)),
    (["large"], (7, 8)),
    (["other"], (48, 50)),
    (["ragged", "object"], np.array([4, 4, 1])),
    (["large"], np.array([], np.int64)),
]


@pytest.mark.parametrize(("fields", "rows"), READS)
def test_wanted_ranges_are_all_that_a_read_needs(block: EncodedBlock, fields: list[str], rows: object) -> None:
    whole = np.frombuffer(block.to_bytes(), np.uint8)
    sparse = np.random.default_rng(0).integers(0, 256, whole.nbytes, np.uint8)
    sparse[:HEADER_BYTES] = whole[:HEADER_BYTES]
    ranges = wanted_ranges(sparse, [BlockRead(UNIT, 1, fields, rows)])  # type: ignore[arg-type]
    for start, stop in ranges or [(0, whole.nbytes)]:
        sparse[start:stop] = whole[start:stop]
    found = BlockView(sparse).select(fields, rows)  # type: ignore[arg-type]
    assert found.to_bytes() == BlockView(whole).select(fields, rows).to_bytes()  # type: ignore[arg-type]


def test_little_is_read_of_a_block_of_which_little_is_wanted(block: EncodedBlock) -> None:
    whole = np.frombuffer(block.to_bytes(), np.uint8)
    ranges = wanted_ranges(whole, [BlockRead(UNIT, 1, ["dense"]), BlockRead(UNIT, 1, ["large"], (0, 2))])
    assert ranges is not None
    assert sum(stop - start for start, stop in ranges) < whole.nbytes // 20
    assert wanted_ranges(whole, [BlockRead(UNIT, 1, ["other"])]) is None  # more than half of it


def test_unknown_field_is_an_error(block: EncodedBlock) -> None:
    with pytest.raises(StorageKeyNotFoundError, match="'nothing' is not in the block"):
        wanted_ranges(np.frombuffer(block.to_bytes(), np.uint8), [BlockRead(UNIT, 1, ["nothing"])])


def test_ranges_are_cut_at_the_ends_of_parts() -> None:
    ranges = [(0, 10), (95, 130), (210, 220)]
    assert overlaps(Part("a", 0, 100), ranges) == [(0, 10), (95, 100)]
    assert overlaps(Part("b", 100, 200), ranges) == [(0, 30)]
    assert overlaps(Part("c", 200, 205), ranges) == []
