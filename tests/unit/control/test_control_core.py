"""What transcripts and random histories do not say: copies, costs, parked requests in number, checks of arguments."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.control.build import Drained, fetch, i64, ints, put, rows, schema
from transfer_queue.control import PARKED, ControlCore
from transfer_queue.control import commands as c
from transfer_queue.control.checkpoint import adopt, capture
from transfer_queue.control.effects import Journal
from transfer_queue.control.queries import subscriptions_of
from transfer_queue.control.records import TagsMerged
from transfer_queue.control.schema import FieldSchema, merge
from transfer_queue.errors import (
    CapacityError,
    InvalidInputError,
    InvalidTypeError,
    RequestError,
    SamplerError,
    WaitTimeoutError,
)
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler


def test_tags_that_were_given_out_stay_as_they_were() -> None:
    core = ControlCore(journal=True)
    given: dict[str, Any] = {"scores": [1], "nested": {"a": [2]}}
    reply: Any = core.apply(put("p", ["a"], "x", tags=[given]), 0)
    kept = [effect for effect in core.drain_effects() if isinstance(effect, Journal)]
    listed: Any = core.apply(c.ListKeys("p"), 0)
    fetched: Any = core.apply(fetch("p", "x", 1), 0)
    core.apply(put("p", ["a"], "y", tags=[{"scores": [3], "more": 4}]), 0)
    assert reply.tags == fetched.tags == [{"scores": [1], "nested": {"a": [2]}}]
    assert listed.value == {"p": {"a": {"scores": [1], "nested": {"a": [2]}}}}
    assert [effect.record.tags for effect in kept if isinstance(effect.record, TagsMerged)] == [[given]]
    found: Any = core.apply(c.Lookup("p", keys=["a"]), 0)
    assert found.tags == [{"scores": [3], "nested": {"a": [2]}, "more": 4}]


def test_tasks_that_have_not_fetched_for_some_time_are_dropped_and_others_are_not() -> None:
    core = ControlCore()
    core.apply(put("p", [f"k{number}" for number in range(10)], "x"), 0)
    for task, at in (("old", 0.0), ("waiting", 0.0), ("new", 90.0)):
        assert len(rows(core.apply(fetch("p", "x", 10, task=task), at))) == 10
    assert core.apply(fetch("p", "x", 1, task="waiting", timeout_s=math.inf), 1.0, request=1) is PARKED
    core.apply(c.ResetConsumption("p", idle_s=60.0), 100.0)
    assert list(core.state.partitions["p"].tasks) == ["waiting", "new"]
    assert len(rows(core.apply(fetch("p", "x", 10, task="old"), 100.0))) == 10
    restored = ControlCore()
    restored.restore(core.snapshot())
    restored.restart_leases(1000.0)
    restored.apply(c.ResetConsumption("p", idle_s=60.0), 1001.0)
    assert sorted(restored.state.partitions["p"].tasks) == ["new", "old", "waiting"]


def test_tasks_that_were_just_answered_or_have_rows_to_acknowledge_are_not_idle() -> None:
    core = ControlCore()
    core.apply(put("p", ["a"], "x"), 0.0)
    core.apply(fetch("new", "x", 1, task="early", timeout_s=math.inf), 0.0, request=1)
    for task in ("leased", "acknowledged"):
        core.apply(msgspec.structs.replace(fetch("p", "x", 1, task=task), lease_s=math.inf), 0.0)
    core.apply(fetch("p", "x", 1, task="timed out"), 0.0)
    core.apply(fetch("p", "x", 1, task="timed out", timeout_s=100.0), 0.0, request=2)
    core.tick(100.0)
    core.apply(put("new", ["a"], "x", block=2), 100.0)
    core.apply(c.Acknowledge("p", "acknowledged", i64(0)), 100.0)

    def names(core: ControlCore, now: float) -> list[str]:
        for partition in ("new", "p"):
            core.apply(c.ResetConsumption(partition, idle_s=60.0), now)
        return [name for partition in core.state.partitions.values() for name in sorted(partition.tasks)]

    assert names(core, 101.0) == ["acknowledged", "leased", "timed out", "early"]
    loaded = ControlCore()
    adopt(loaded, capture(core), now=1000.0)
    assert names(loaded, 1001.0) == ["acknowledged", "leased", "timed out", "early"]


def test_tags_merge_by_top_level_entries_only() -> None:
    core = ControlCore()
    core.apply(put("p", ["a"], tags=[{"kept": 1, "nested": {"old": 1}}]), 0)
    reply: Any = core.apply(put("p", ["a"], tags=[{"nested": {"new": 2}}]), 0)
    assert reply.tags == [{"kept": 1, "nested": {"new": 2}}]


def test_polling_core_never_parks() -> None:
    core = ControlCore(polling=True)
    assert rows(core.apply(fetch("p", "x", 1, timeout_s=60.0), 0)) == []
    assert core.next_deadline() is None


def test_next_deadline_is_the_soonest_of_those_still_waiting() -> None:
    core = ControlCore()
    assert core.apply(fetch("p", "x", 1, timeout_s=math.inf), 0, request=1) is PARKED
    assert core.next_deadline() is None
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 1.0, request=2)
    core.apply(fetch("p", "y", 1, timeout_s=3.0), 1.0, request=3)
    assert core.next_deadline() == 4.0
    core.cancel(0, 3)
    assert core.next_deadline() == 10.0
    core.tick(9.9)
    assert Drained(core).answers == []
    core.tick(10.0)
    assert isinstance(Drained(core).by_request[2], WaitTimeoutError)
    assert core.next_deadline() is None


def test_cancelled_client_takes_no_rows() -> None:
    core = ControlCore()
    for request in range(5):
        core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=1, request=request)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=2, request=0)
    core.cancel(1)
    core.cancel(1, 3)  # gone already: fine
    core.apply(put("p", 1, "x"), 0)
    assert [(answer.client, answer.request) for answer in Drained(core).answers] == [(2, 0)]
    core.validate_state()


def test_cancelling_the_first_in_line_lets_the_next_one_go() -> None:
    core = ControlCore()
    core.apply(put("p", 1, "x"), 0)
    core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, request=2)
    assert Drained(core).answers == []
    core.cancel(0, 1)
    assert rows(Drained(core).by_request[2]) == [0]


def test_one_poll_does_not_overtake_a_waiting_fetch() -> None:
    core = ControlCore()
    core.apply(put("p", 1, "x"), 0)
    core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=1)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == []
    assert rows(core.apply(fetch("p", "x", 1, task="other"), 0)) == [0]


def test_thousands_of_waiters_are_answered_once_each_in_order() -> None:
    core = ControlCore()
    for request in range(2000):
        core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=request % 7, request=request)
    answered = []
    for block in range(20):
        core.apply(put("p", 100, "x", block=block), 0)
        answered += [(answer.request, rows(answer.reply)) for answer in Drained(core).answers]
    assert answered == [(request, [request]) for request in range(2000)]
    assert len(core.wait_queue) == 0


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    core = ControlCore()
    for number in range(3000):
        core.apply(fetch("p", "x", 1, timeout_s=3600.0), 0, request=number)
        core.apply(put("p", 1, "x", block=number), 0)
        core.drain_effects()
    assert len(core.wait_queue._deadlines) < 100


def test_parked_request_numbers_must_differ() -> None:
    core = ControlCore(sample_capacity=1)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=1, request=1)
    with pytest.raises(RequestError, match="waiting already"):
        core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=1, request=1)


def test_capacity_error_says_capacity() -> None:
    core = ControlCore(sample_capacity=2)
    with pytest.raises(CapacityError, match="capacity"):
        core.apply(put("p", 3, "x"), 0)
    with pytest.raises(InvalidInputError, match="sample_capacity must be positive"):
        ControlCore(sample_capacity=0)


def test_parked_commit_that_went_wrong_meanwhile_gets_the_error() -> None:
    core = ControlCore(sample_capacity=1)
    core.apply(put("p", 1, "x", block=1), 0)
    assert core.apply(put("p", ["a"], "x", block=2, unit=2, wait_s=9.0), 0, request=1) is PARKED
    core.unit_lost(2, 0)
    core.apply(c.Clear("p"), 0)
    assert type(Drained(core).by_request[1]).__name__ == "DataLostError"
    assert core.state.rows == 0


def test_a_rank_that_waits_learns_at_once_that_its_rows_are_gone_when_their_unit_returns_without_them() -> None:
    core = ControlCore(sampler=RankAwareSampler())
    core.apply(put("p", 2, "x"), 0)
    rank = {"dp_rank": 0, "batch_index": 0}
    assert rows(core.apply(fetch("p", "x", 2, **rank), 0)) == [0, 1]
    again = ControlCore(sampler=RankAwareSampler())
    again.restore(core.snapshot())
    assert again.apply(fetch("p", "xy", 2, timeout_s=10, **rank), 0, request=1) is PARKED
    again.unit_joined(1, [])
    assert type(Drained(again).by_request[1]).__name__ == "DataLostError"


def test_a_row_committed_while_its_unit_came_back_is_ready_once_the_unit_tells_of_its_block() -> None:
    core = ControlCore()
    core.apply(put("p", 1, "x", block=5), 0)
    core.unit_suspect(1)
    core.unit_joined(1, [], 0)  # listed before block 5 was stored
    assert core.apply(fetch("p", "x", 1, timeout_s=9), 0, request=1) is PARKED
    core.unit_holds(1, [4, 5], 0)
    assert rows(Drained(core).by_request[1]) == [0]
    core.validate_state()


def test_other_objects_are_not_commands() -> None:
    with pytest.raises(InvalidTypeError, match="not a command"):
        ControlCore().apply(c.Done(), 0)  # type: ignore[arg-type]


def test_shards_have_indexes_of_their_own() -> None:
    core = ControlCore(shard=3)
    assert rows_of(core.apply(put("p", 2, "x"), 0)) == [3 << 48, (3 << 48) + 1]
    with pytest.raises(InvalidInputError, match="shard"):
        ControlCore(shard=1 << 15)


def rows_of(reply: Any) -> list[int]:
    return ints(reply.indexes)


def test_indexes_go_on_in_another_extent_after_a_million_rows() -> None:
    core = ControlCore()
    core.apply(put("p", 2**20 - 1, "x", block=1), 0)
    core.apply(put("q", 1, "x", block=2), 0)
    assert rows_of(core.apply(put("p", 3, "x", block=3), 0)) == [2**20 - 1, 2**21, 2**21 + 1]
    found: Any = core.apply(c.Lookup("p", indexes=i64(2**21 + 1, 2**20 - 1, 0)), 0)
    assert ints(found.locations[0].row_in_block, "<i4") == [2, 0, 0]
    missing: Any = core.apply(c.Lookup("p", indexes=i64(2**20, 2**21), partial=True), 0)
    assert rows(missing) == [2**21]


def test_cleared_rows_at_the_front_give_their_memory_back() -> None:
    core = ControlCore()
    core.apply(fetch("p", "x", 1), 0)
    for number in range(200):
        core.apply(put("p", [f"{number}-{i}" for i in range(256)], "x", block=number), 0)
        taken: Any = core.apply(fetch("p", "x", 256), 0)
        core.apply(c.Clear("p", indexes=taken.indexes), 0)
        core.drain_effects()
    partition = core.state.partitions["p"]
    assert partition.table.capacity <= 4096
    assert partition.base > 50_000 - 4096
    assert not partition.keys
    core.validate_state()


def test_metadata_takes_at_most_64_bytes_a_sample() -> None:
    core = ControlCore()
    names = "abcdefgh"
    for number in range(3000):
        core.apply(put("p", 1, names, block=number), 0)
        core.apply(fetch("p", names, 1), 0)
    ready = sum(len(s.ready.bits) for s in core.state.partitions["p"].subscriptions.values())  # type: ignore[attr-defined]
    used = (
        core.state.partitions["p"].table.nbytes
        + core.state.blocks.memory
        + ready * 3000 // core.state.partitions["p"].table.capacity
    )
    used += core.state.partitions["p"].tasks["t"].nbytes
    assert used / 3000 <= 64


def test_snapshot_goes_through_msgpack_and_is_refused_where_it_does_not_belong() -> None:
    core = ControlCore()
    core.apply(put("p", ["a"], "x", tags=[{"n": 1}]), 0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(core.snapshot()))
    other = ControlCore()
    other.restore(state)
    assert other.describe() == core.describe()
    with pytest.raises(RequestError, match="empty controller"):
        other.restore(state)
    with pytest.raises(RequestError, match="shard"):
        ControlCore(shard=1).restore(state)
    with pytest.raises(RequestError, match="format"):
        ControlCore().restore({**state, "format": 99})


def test_core_without_journal_records_nothing() -> None:
    core = ControlCore()
    core.apply(put("p", ["a"], "x"), 0)
    core.apply(fetch("p", "x", 1), 0)
    assert core.drain_effects() == []


def test_journal_records_carry_the_request_that_caused_them() -> None:
    core = ControlCore(journal=True)
    core.apply(fetch("p", "x", 1, timeout_s=9.0), 0, client=5, request=6)
    core.apply(put("p", 1, "x"), 0, client=7, request=8)
    records = [(type(e.record).__name__, e.client, e.request) for e in core.drain_effects() if hasattr(e, "record")]
    assert records == [
        ("PartitionCreated", 7, 8),
        ("RowsCreated", 7, 8),
        ("CellsWritten", 7, 8),
        ("RowsConsumed", 5, 6),
    ]


def test_new_sampler_takes_over_rows_and_waiters() -> None:
    core = ControlCore()
    core.apply(put("p", 5, "x"), 0)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == [0]
    core.apply(fetch("p", "x", 6, timeout_s=9.0), 0, request=1)
    core.apply(fetch("p", "x", 7, timeout_s=9.0, task="u"), 0, request=2)
    core.set_sampler(GRPOGroupNSampler(2))
    core.validate_state()
    core.apply(put("p", 5, "x", block=2), 0)
    answers = Drained(core).by_request
    assert rows(answers[1]) == [2, 3, 4, 5, 6, 7]
    assert isinstance(answers[2], SamplerError)


def test_rows_that_were_consumed_and_cleared_still_count_as_consumed() -> None:
    core = ControlCore()
    core.apply(put("p", 4, "x"), 0)
    core.apply(fetch("p", "x", 3), 0)
    core.apply(c.Clear("p", indexes=i64(0, 1, 3)), 0)  # the last one was not consumed
    (seen,) = subscriptions_of(core.state.partitions["p"])
    assert (seen["consumed"], seen["ready"]) == (3, 0)


def test_groups_that_two_clients_create_row_by_row_are_refused() -> None:
    core = ControlCore(sampler=GRPOGroupNSampler(2))
    for block, client in enumerate((1, 1, 2, 2, 1, 2), start=1):
        core.apply(put("p", 1, "x", block=block), 0, client=client)
        if block == 4:
            assert rows(core.apply(fetch("p", "x", 2), 0)) == [0, 1]
    with pytest.raises(
        SamplerError, match=r"group of rows 4 to 5 of partition 'p' .* begun by one client and continued"
    ):
        core.apply(fetch("p", "x", 2), 0)
    core.apply(c.Clear("p"), 0)
    core.apply(put("p", 2, "", block=7), 0, client=1)  # registered together: any client may fill them in
    registered: Any = core.apply(c.Lookup("p"), 0)
    for block, at in enumerate((0, 8), start=7):
        core.apply(put("p", registered.indexes[at : at + 8], "x", block=block), 0, client=block)
    assert len(rows(core.apply(fetch("p", "x", 2), 0))) == 2


def test_a_client_completes_a_group_of_another_only_with_a_put_that_names_its_rows() -> None:
    core = ControlCore(sampler=GRPOGroupNSampler(4))
    core.apply(put("p", ["7.0", "7.1"], "x", block=1), 0, client=1)
    core.apply(put("p", ["7.0", "7.1", "7.2"], "x", block=2), 0, client=2)  # in place of client 1, which died
    core.apply(put("p", ["7.3"], "x", block=3), 0, client=2)
    core.apply(put("p", ["8.0"], "x", block=4), 0, client=1)
    assert rows(core.apply(fetch("p", "x", 4), 0)) == [0, 1, 2, 3]
    core.apply(put("p", ["7.3", "8.1", "8.2", "8.3"], "x", block=5), 0, client=2)  # without 8.0
    with pytest.raises(SamplerError, match=r"group of rows 4 to 7 .* puts the whole group again, by its keys"):
        core.apply(fetch("p", "x", 4), 0)


def test_groups_by_a_tag_come_from_any_client_in_any_order() -> None:
    core = ControlCore(sampler=GRPOGroupNSampler(2, group_tag="prompt"))
    for block, prompt in enumerate("abbcca", start=1):
        core.apply(put("p", 1, "x", block=block, tags=[{"prompt": prompt}]), 0, client=block)
        if block == 2:
            core.apply(fetch("p", "x", 2, timeout_s=9.0), 0, request=9)
    assert rows(Drained(core).by_request[9]) == [1, 2]
    assert rows(core.apply(fetch("p", "x", 4), 0)) == [0, 5, 3, 4]
    core.apply(put("p", 2, "x", block=7), 0)
    with pytest.raises(SamplerError, match=r"row 6 needs the tag 'prompt'"):
        core.apply(fetch("p", "x", 2), 0)


def test_rank_that_waits_is_served_when_another_line_draws_its_batch() -> None:
    core = ControlCore(sampler=RankAwareSampler())
    core.apply(put("p", 1, "xy"), 0)
    core.apply(fetch("p", "x", 2, timeout_s=9.0, dp_rank=0, batch_index=0), 0, request=1)
    assert rows(core.apply(fetch("p", "xy", 1, dp_rank=0, batch_index=0), 0)) == [0]
    assert rows(Drained(core).by_request[1]) == [0]


def test_tags_that_are_no_lengths_leave_the_rows_where_they_were() -> None:
    core = ControlCore(sampler=SeqlenBalancedSampler(1, 2))
    core.apply(put("p", 2, "x", tags=[{"total_lengths": "long"}, {}]), 0)
    with pytest.raises(SamplerError, match="could not deal 2 rows"):
        core.apply(fetch("p", "x", 1), 0)
    core.validate_state()
    core.apply(c.SetTags("p", i64(0), [{"total_lengths": 7}]), 0)
    assert rows(core.apply(fetch("p", "x", 1), 0)) == [0]


def test_status_of_many_rows_is_right_at_both_ends() -> None:
    core = ControlCore()
    core.apply(put("p", 100_000, "xy"), 0)
    core.apply(put("p", i64(0, 99_999), "z", block=2), 0)
    produced: Any = core.apply(c.ProductionStatus("p", ["z", "x"]), 0)
    assert produced.columns == ["x", "z"]
    status = np.frombuffer(produced.status, np.int8).reshape(-1, 2)
    assert status[:, 0].all()
    assert np.flatnonzero(status[:, 1]).tolist() == [0, 99_999]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("dense", "f", (2,)), ("dense", "f", (2,)), ("dense", "f", (2,))),
        (("dense", "f", (2,)), ("dense", "f", (3,)), ("ragged", "f", (None,))),
        (("dense", "f", (2, 3)), ("dense", "f", (2, 4)), ("ragged", "f", (2, None))),
        (("dense", "f", (2,)), ("ragged", "f", (None,)), ("ragged", "f", (None,))),
        (("dense", "f", (2,)), ("dense", "f", (2, 2)), ("object", "object", None)),
        (("dense", "f", (2,)), ("dense", "i", (2,)), ("object", "object", None)),
        (("text", "str", None), ("text", "str", None), ("text", "str", None)),
        (("text", "str", None), ("dense", "f", ()), ("object", "object", None)),
    ],
)
def test_merged_schema_is_true_of_both(one: Any, other: Any, expected: Any) -> None:
    assert merge([FieldSchema("x", *one), FieldSchema("x", *other)]) == FieldSchema("x", *expected)


def test_changed_dtype_shows_in_the_schema() -> None:
    core = ControlCore()
    core.apply(put("p", ["a", "b"], schema("x")), 0)
    core.apply(put("p", ["a", "b"], schema("x", dtype="int64"), block=2), 0)
    found: Any = core.apply(c.Lookup("p", keys=["a", "b"]), 0)
    assert [field.dtype for field in found.fields] == ["int64"]


def test_control_plane_loads_no_torch_sockets_or_event_loops() -> None:
    code = (
        "import sys, transfer_queue.control, transfer_queue.sampler\n"
        "assert not {'torch', 'tensordict', 'asyncio', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_client_that_leaves_takes_no_rows_with_a_request_behind_another_of_its_own() -> None:
    core = ControlCore()
    assert core.apply(c.Fetch("p", ["x"], 2, "train", 10.0), 0, client=1, request=1) is PARKED
    assert core.apply(c.Fetch("p", ["x"], 1, "train", 10.0), 0, client=1, request=2) is PARKED
    core.apply(put("p", ["a"], "x"), 0)
    core.cancel(1)
    assert not [effect for effect in core.drain_effects() if hasattr(effect, "reply")]
    taken: Any = core.apply(c.Fetch("p", ["x"], 1, "train"), 0, client=2, request=1)
    assert taken.keys == ["a"]
    core.validate_state()


def test_a_task_costs_what_it_consumed_and_not_what_there_is() -> None:
    core = ControlCore()
    core.apply(put("p", 100_000, "x"), 0)
    partition = core.state.partitions["p"]
    before = partition.table.nbytes
    for number in range(1000):
        assert len(rows(core.apply(fetch("p", "x", 10, f"task {number}"), 0))) == 10
    assert partition.table.nbytes == before
    assert sum(task.nbytes for task in partition.tasks.values()) < 1000 * 1100


def test_tasks_that_took_nothing_are_forgotten_with_their_subscriptions() -> None:
    core = ControlCore()
    core.apply(put("p", 2, "x"), 0)
    partition = core.state.partitions["p"]
    for number in range(300):
        assert rows(core.apply(fetch("p", "x", 3, f"task {number}"), 0)) == []
        core.validate_state()
    assert len(partition.tasks) == len(partition.subscriptions) == 256
    assert core.apply(fetch("p", "x", 3, "waits", timeout_s=9.0), 0, request=1) is PARKED
    for number in range(300):
        core.apply(fetch("p", "xy"[number % 2 :], 3, f"later {number}"), 0)
    assert "waits" in partition.tasks
    core.apply(put("p", 1, "x", block=2), 0)
    assert [answer.request for answer in Drained(core).answers] == [1]
    core.validate_state()


def test_a_reset_drops_tasks_for_which_nobody_waits() -> None:
    core = ControlCore(lease_s=60.0)
    core.apply(put("p", 4, "x"), 0)
    for task in ("idle", "waiting", "other"):
        assert rows(core.apply(fetch("p", "x", 4, task), 0)) == [0, 1, 2, 3]
    assert core.apply(fetch("p", "x", 1, "waiting", timeout_s=9.0), 0, request=1) is PARKED
    partition = core.state.partitions["p"]
    core.apply(c.ResetConsumption("p", "idle"), 0)
    core.validate_state()
    assert list(partition.tasks) == ["waiting", "other"]
    core.apply(c.ResetConsumption("p"), 0)
    core.validate_state()
    assert list(partition.tasks) == ["waiting"]
    assert [answer.request for answer in Drained(core).answers] == [1]
    assert rows(core.apply(fetch("p", "x", 4, "idle"), 0)) == [0, 1, 2, 3]


def test_tasks_whose_rows_are_all_cleared_are_forgotten() -> None:
    core = ControlCore()
    for step in range(400):
        core.apply(put("p", 100, "x", block=step + 1), 0)
        taken = rows(core.apply(fetch("p", "x", 100, f"step {step}"), 0))
        core.apply(c.Clear("p", indexes=i64(*taken)), 0)
    core.validate_state()
    assert len(core.state.partitions["p"].tasks) < 256 + 20


def test_many_rows_keep_fewer_subscriptions() -> None:
    core = ControlCore()
    core.apply(put("p", 1, "x"), 0)
    for number in range(100):
        core.apply(fetch("p", "x", 2, f"task {number}"), 0)
    partition = core.state.partitions["p"]
    assert len(partition.subscriptions) == 100
    core.apply(put("p", 3_000_000, "x", block=2), 0)
    assert len(partition.subscriptions) == (64 << 20) // partition.table.capacity
    assert "task 99" in partition.tasks


def test_puts_of_equal_fields_share_one_schema_wherever_they_are() -> None:
    core = ControlCore()
    for number in range(50):
        core.apply(put(f"p{number % 25}", 1, "xy", block=number + 1), 0)
        core.apply(fetch(f"p{number % 25}", "x", 1, f"task {number}"), 0)
    assert len(core.state.blocks.schemas) == 1
    core.apply(put("p0", 1, "x", block=51), 0)
    assert len(core.state.blocks.schemas) == 2
    core.validate_state()


def test_kinds_of_puts_are_remembered_up_to_a_bound() -> None:
    core = ControlCore()
    for number in range(1000):
        core.apply(put("p", 1, schema("x", shape=(number + 1,)), block=number + 1), 0)
    assert len(core.state.partitions["p"]._layouts) <= 128
    fetched: Any = core.apply(fetch("p", "x", 1000), 0)
    assert fetched.fields == [FieldSchema("x", "ragged", "float32", (None,))]
    core.validate_state()


def test_a_snapshot_with_equal_schemas_under_two_numbers_is_taken_up() -> None:
    core = ControlCore()
    core.apply(put("p", ["a"], schema("x", shape=(1,)), block=1), 0)
    core.apply(put("p", ["b"], schema("x", shape=(2,)), block=2), 0)
    state = core.snapshot()
    _, schemas = state["blocks"]["schemas"]
    schemas[1][2] = schemas[0][2]
    other = ControlCore()
    other.restore(state)
    other.validate_state()
    for key in ("a", "b"):
        other.apply(c.Clear("p", keys=[key]), 0)
        other.validate_state()
