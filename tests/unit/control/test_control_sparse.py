"""Sparse columns against plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.control.arrays import compact
from transfer_queue.control.sparse import SparseColumn

_ROWS = 8000
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "scatter", "drop_front", "load", "clear"]),
        st.integers(0, _ROWS - 1),
        st.sampled_from([1, 1, 2, 511, 512, 513, 2500]),
        st.integers(0, 3),
        st.integers(0, 1000),
    ),
    max_size=20,
)


@settings(max_examples=300)
@given(steps=_STEPS)
def test_a_sparse_column_reads_as_an_array_that_was_written_alike(steps: Any) -> None:
    column, plain = SparseColumn(np.int64), np.zeros(_ROWS, np.int64)
    for what, start, count, value, seed in steps:
        if what == "write":
            run = slice(start, min(start + count, _ROWS))
            column[run] = plain[run] = value
        elif what == "scatter":
            picked = np.random.default_rng(seed).choice(_ROWS, min(count, _ROWS), replace=False)
            column[picked] = plain[picked] = value
        elif what == "drop_front":
            column.drop_front(start)
            plain = np.concatenate((plain[start:], np.zeros(start, np.int64)))
        elif what == "load":
            plain[: start - 1] = 0
            column.load(plain)
        else:
            column.clear()
            plain[:] = 0
        picked = np.random.default_rng(seed).integers(0, _ROWS, count)
        run = slice(start, min(start + count, _ROWS))
        assert np.array_equal(column[slice(0, _ROWS)], plain)
        assert np.array_equal(column[run], plain[run])
        assert np.array_equal(column[picked], plain[picked])
        assert np.array_equal(column[compact(np.zeros(0, np.int64))], [])
        assert column.item(start) == plain[start]
        assert [column.count(number) for number in (1, 2, 3)] == [int((plain == n).sum()) for n in (1, 2, 3)]
        assert column.is_empty <= (not plain.any())
        restored = SparseColumn(np.int64)
        restored.restore(column.dump(), _ROWS)
        assert np.array_equal(restored[slice(0, _ROWS)], plain)


def test_a_dump_follows_the_rows_that_were_written() -> None:
    column = SparseColumn(np.uint8)
    column[slice(0, 100_000)] = 1
    column[slice(1, 100_000)] = 0
    column[slice(70_000, 70_003)] = 2
    dumped = column.dump()
    assert dumped[::2] == [0, 69632]
    assert sum(map(len, dumped[1::2])) == 1024


def test_memory_follows_the_rows_that_were_written() -> None:
    column = SparseColumn(np.uint8)
    column[slice(0, 10_000_000)] = 0
    assert column.nbytes == 0
    column[slice(9_999_000, 10_000_000)] = 1
    assert column.nbytes < 3000
    column[np.arange(0, 10_000_000, 1_000_000)] = 1
    assert column.nbytes < 250_000
    column.drop_front(9_999_900)
    assert column.nbytes < 1100
    column[slice(0, 100)] = 0
    column.drop_front(600)
    assert column.is_empty
    assert column.nbytes == 0
