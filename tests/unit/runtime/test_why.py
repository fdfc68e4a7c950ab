"""Why requests wait, in words."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from transfer_queue.config.processes import ControllerConfig
from transfer_queue.control.commands import BlockRef, Commit, Fetch
from transfer_queue.control.core import ControlCore
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.runtime.controller import Controller
from transfer_queue.runtime.last_writes import LastWrites
from transfer_queue.runtime.why import _missing, explain, explain_timeout, find_writers


class Waiter(dict[str, Any]):
    """Counts how often it is followed."""

    followed = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.followed += key == "writers"
        return super().get(key, default)


def make_waiter(number: int) -> Waiter:
    writer = {
        "field": "reward",
        "rows": 1,
        "client": "worker",
        "task": "trainer",
        "partition": "train",
        "ago_s": 1.0,
        "connected": True,
        "clients": 1,
        "clients_connected": 1,
    }
    return Waiter(
        kind="fetch",
        client="worker",
        task=f"task {number % 2}",
        partition="train",
        waited_s=1.0,
        rows=1,
        lacks="nothing",
        writers=[writer, {**writer, "field": "value"}],
    )


def test_each_waiter_is_followed_once_from_each_other_one() -> None:
    waiters = [make_waiter(number) for number in range(20)]
    explain({"waiters": waiters, "units": [], "expected_units": 0})
    assert max(waiter.followed for waiter in waiters) <= len(waiters) + 1


def test_the_stage_that_holds_up_the_others_is_told_with_its_rows_a_second() -> None:
    writes = LastWrites()
    reward = Commit("train", append=4, fields=[FieldSchema("reward", "dense", "float32", ())])
    for at in range(0, 301, 2):  # 2 rows a second for five minutes
        writes.note("worker", reward, float(at), 4)
    (write,) = writes.all_of("reward")
    assert write.pace(300.0) == pytest.approx(2.0)
    assert write.pace(400.0) < 1.0  # it has stopped
    waiters = [make_waiter(number) for number in range(2)]
    for waiter in waiters:
        waiter["client"] = "trainer"
        waiter["writers"] = [{**waiter["writers"][0], "task": "reward", "rows_s": write.pace(300.0)}]
    cause = explain({"waiters": waiters, "units": [], "expected_units": 0})[0]
    assert cause.startswith("field 'reward' holds up tasks 'task 0', 'task 1': ")
    assert cause.endswith("which is connected and waits for nothing itself: 'reward' itself is slow, at 2 rows/s")


async def test_of_one_client_for_all_stages_the_field_at_the_end_of_the_chain_is_told() -> None:
    core = ControlCore()
    controller = Controller(ControllerConfig(), core, asyncio.get_running_loop())
    core.unit_joined(1, [], 0.0)
    writes = controller.last_writes

    def put(field: str, block: int, rows: int, **to: Any) -> None:
        schema = FieldSchema(field, "dense", "float32", ())
        commit = Commit("s", fields=[schema], blocks=[BlockRef(1, block, 0, rows, 100)], **to)
        core.apply(commit, 0.0, client=1, request=block)
        writes.note("driver", commit, 0.0)

    def take(task: str, *fields: str) -> None:
        writes.fetches("driver", task)
        writes.takes("driver", task, fields)

    put("tok", 1, 8, append=8)
    take("rm", "tok")
    writes.fetches("driver", "train")  # waits in another thread: it has no rows whose results it could write
    put("rw", 2, 2, indexes=np.arange(2).tobytes())
    take("adv", "tok", "rw")
    take("rm", "tok")
    take("adv", "tok", "rw")
    put("ad", 3, 2, indexes=np.arange(2).tobytes())
    assert writes.producer_of("rw", "driver") == "rm"
    waiters = []
    for task, fields in (("adv", ["tok", "rw"]), ("train", ["tok", "ad"])):
        writers = find_writers(controller, _missing(controller, Fetch("s", fields=fields, batch_size=4, task=task)))
        about = {"client": "driver", "task": task, "fields": fields, "writers": writers}
        waiters.append({**make_waiter(0), **about})
    cause, *rest = explain({"waiters": waiters, "units": [], "expected_units": 0})
    assert cause.startswith("field 'rw' holds up tasks 'adv', 'train': 'rw' was last written ")
    assert "by driver (task 'rm'), which is " in cause
    assert cause.endswith("; task 'rm' waits for nothing")
    assert not any("waits for nothing itself" in each for each in (cause, *rest))


def test_a_client_that_waits_in_a_put_is_not_said_to_wait_for_nothing() -> None:
    fetch = {**make_waiter(0), "client": "trainer", "task": "trainer"}
    fetch["writers"] = fetch["writers"][:1]
    put = {**make_waiter(0), "kind": "put", "task": "", "writers": []}
    cause = explain({"waiters": [fetch, put], "units": [], "expected_units": 0})[0]
    assert cause.startswith("field 'reward' holds up task 'trainer': ")
    assert cause.endswith("which is connected and waits in a put itself")


async def test_a_fetch_that_timed_out_names_the_writer_of_a_field_that_its_partition_has_not_seen_yet() -> None:
    core = ControlCore()
    controller = Controller(ControllerConfig(), core, asyncio.get_running_loop())
    core.unit_joined(1, [], 0.0)
    tokens, reward = (FieldSchema(name, "ragged", "int64", (None,)) for name in ("tokens", "reward"))
    core.apply(Commit("new", append=2, fields=[tokens], blocks=[BlockRef(1, 1, 0, 2, 100)]), 0.0, client=1, request=0)
    controller.last_writes.note("hung", Commit("old", append=2, fields=[reward]), 0.0)
    controller.last_writes.note("busy", Commit("old", append=2, fields=[tokens]), 0.0)
    command = Fetch("new", fields=["tokens", "reward"], batch_size=2, task="trainer")
    shortfall = core.serving.shortfall(command, core.state.partitions["new"])
    error = explain_timeout(controller, command, WaitTimeoutError(shortfall))
    assert "'reward' was last written" in str(error)
    assert "in 'old' by hung" in str(error)
    assert "busy" not in str(error)


async def test_fields_that_are_missing_on_as_many_rows_share_one_sentence() -> None:
    core = ControlCore()
    core.unit_joined(1, [], 0.0)
    fields = [FieldSchema(name, "dense", "float32", ()) for name in ("tok", "a", "b", "c")]
    core.apply(Commit("s", append=3, fields=fields[:1], blocks=[BlockRef(1, 1, 0, 3, 9)]), 0.0, client=1, request=1)
    two = Commit("s", append=2, fields=fields[:3], blocks=[BlockRef(1, 2, 0, 2, 9)])
    core.apply(two, 0.0, client=1, request=2)
    one = Commit("s", append=1, fields=fields, blocks=[BlockRef(1, 3, 0, 1, 9)])
    core.apply(one, 0.0, client=1, request=3)
    command = Fetch("s", fields=["tok", "a", "b", "c"], batch_size=6, task="trainer")
    words = core.serving.shortfall(command, core.state.partitions["s"])
    assert words == "1 are ready, 'a' and 'b' are missing on 3 of 6, 'c' is missing on 5 of 6"
