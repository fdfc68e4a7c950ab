"""Which of several controllers has which partition, and whose numbers are whose."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from transfer_queue.control.commands import ListKeys, ListPartitions, Lookup, Value
from transfer_queue.control.directory import Shard, merge_values, shard_of, shard_of_block, spans
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.sessions import ClientSessions
from transfer_queue.wire.messages import Hello


def test_a_partition_is_on_the_same_shard_for_ever() -> None:
    """Other processes and later releases have to find what is there: these numbers may not change."""
    assert [shard_of(f"step-{number}", 3) for number in range(12)] == [0, 1, 0, 2, 0, 0, 1, 2, 0, 1, 0, 0]
    assert [shard_of(name, 64) for name in ("", "ä", "\ud800")] == [61, 21, 46]


def test_partitions_spread_evenly_and_few_move_with_one_more_shard() -> None:
    names = [f"partition {number}" for number in range(8000)]
    counts = Counter(shard_of(name, 8) for name in names)
    assert set(counts) == set(range(8))
    assert all(850 < count < 1150 for count in counts.values()), counts
    moved = [name for name in names if shard_of(name, 9) != shard_of(name, 8)]
    assert {shard_of(name, 9) for name in moved} == {8}


@pytest.mark.parametrize("shards", [1, 2, 3, 64])
def test_writers_of_different_shards_never_share_a_number(shards: int) -> None:
    nobody = cast("Connection", None)
    for shard in range(shards):
        sessions = ClientSessions("run", shard=shard, shards=shards)
        sessions._next_writer = sessions._numbers - 2  # the last numbers: then it begins anew
        writers = [sessions.admit(Hello("client", str(number)), nobody)[0].writer for number in range(5)]
        assert len(set(writers)) == 5
        assert all(0 < writer < 2**31 for writer in writers)
        assert {shard_of_block(writer << 32 | 0xFFFFFFFF, shards) for writer in writers} == {shard}


def test_a_shard_introduces_itself() -> None:
    shard = Shard(1, ["a:1", "b:2"])
    assert Shard.of(shard.attribute()) == shard
    assert Shard.of({"metrics": "a:3"}) is None


def test_requests_about_all_partitions_go_to_all_shards() -> None:
    assert spans(ListPartitions("p"))
    assert spans(ListKeys(""))
    assert not spans(ListKeys("p"))
    assert not spans(Lookup("p"))
    assert merge_values([Value(["a"]), Value([]), Value(["b", "c"])]) == Value(["a", "b", "c"])
    assert merge_values([Value({"a": {}}), Value({"b": {"k": {}}})]) == Value({"a": {}, "b": {"k": {}}})


def test_counts_of_all_shards_are_added_and_their_partitions_joined() -> None:
    counts = [{"partitions": {"a": {"rows": 2}}, "rows": 2}, {"partitions": {}, "rows": 0}]
    assert merge_values([Value(each) for each in counts]) == Value({"partitions": {"a": {"rows": 2}}, "rows": 2})
