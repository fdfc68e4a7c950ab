"""Ready queues against sorted sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.control.arrays import as_positions, compact, from_runs, to_runs
from transfer_queue.control.ready import make_ready_queue

_CAPACITY = 5000
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "discard", "take"]),
        st.integers(0, _CAPACITY - 1),
        st.integers(1, 1500),
        st.sampled_from([1, 1, 2, 7, 300]),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(group=st.sampled_from([1, 1, 3, 64]), offset=st.integers(0, 5), steps=_STEPS)
def test_queue_gives_the_lowest_members_and_forgets_them(group: int, offset: int, steps: Any) -> None:
    offset %= group
    queue = make_ready_queue(_CAPACITY, group, offset)
    members: set[int] = set()
    for what, start, count, stride in steps:
        positions = np.arange(start, min(start + count * stride, _CAPACITY), stride, dtype=np.int64)
        given_rows = compact(positions)
        if what == "add":
            fresh = queue.add(given_rows)
            assert set(() if fresh is None else as_positions(fresh).tolist()) == set(positions.tolist()) - members
            members |= set(positions.tolist())
        elif what == "discard":
            gone = queue.discard(given_rows)
            assert set(() if gone is None else as_positions(gone).tolist()) == set(positions.tolist()) & members
            members -= set(positions.tolist())
        else:
            drawable = _complete(members, group, offset)
            want = min(len(drawable), count // group * group)
            if want:
                taken = as_positions(queue.take(want)).tolist()
                assert taken == drawable[:want]
                members -= set(taken)
        assert queue.available == len(_complete(members, group, offset))
        assert queue.members().tolist() == sorted(members)


def _complete(members: set[int], group: int, offset: int) -> list[int]:
    groups: dict[int, list[int]] = {}
    for position in sorted(members):
        groups.setdefault((position + offset) // group, []).append(position)
    return [position for rows in groups.values() if len(rows) == group for position in rows]


@pytest.mark.parametrize("group", [1, 2])
def test_resized_queue_keeps_its_members(group: int) -> None:
    queue = make_ready_queue(64, group, 0)
    queue.add(slice(10, 60))
    queue.resize(4096)
    queue.add(slice(60, 4000))
    assert as_positions(queue.take(3990)).tolist() == list(range(10, 4000))
    assert queue.available == 0


@given(st.lists(st.integers(0, 50), max_size=30))
def test_runs_keep_rows_and_their_order(positions: list[int]) -> None:
    rows = compact(np.array(positions, np.int64))
    runs = to_runs(rows, 7)
    assert as_positions(from_runs(runs, 7)).tolist() == positions
