"""Samplers in a controller: a user's own, the ones that go by tags, and what is said of wrong ones and where."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.queue_command import QueueCommand
from tests.integration.stack import ROOT, Stack, running_stack
from tests.integration.user_samplers import Failing, Highest, NewestFirst, Unruly
from transfer_queue.errors import ConfigError, SamplerError
from transfer_queue.sampler import BaseSampler

SIMPLE = {"SimpleStorage": {"num_data_storage_units": 1, "unit_capacity": "16Mi"}}


def column(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, [count])


def values(meta: tq.BatchMeta) -> list[int]:
    found: list[int] = tq.get_client().get_data(meta)["x"].tolist()
    return found


def take(partition: str, size: int, timeout: float = 5.0, **params: Any) -> tq.BatchMeta:
    return tq.get_client().get_meta(["x"], size, partition, task_name="t", sampling_config=params, timeout=timeout)


@pytest.fixture
def local() -> Iterator[None]:
    with preloaded.servers():
        yield
    tq.close()


@pytest.mark.parametrize(
    ("sampler", "expected"), [(NewestFirst, [5, 4]), (NewestFirst(reverse=True), [0, 1])], ids=["class", "instance"]
)
def test_init_takes_a_users_sampler(local: None, sampler: Any, expected: list[int]) -> None:
    tq.init({"controller": {"sampler": sampler}, "backend": SIMPLE})
    tq.get_client().put(column(6), partition_id="p")
    assert values(take("p", 2, keep=True)) == expected
    assert values(take("p", 2)) == expected
    assert values(take("p", 2)) != expected


def test_a_sampler_gets_the_arrays_of_the_sampling_config(local: None) -> None:
    tq.init({"controller": {"sampler": Highest}, "backend": SIMPLE})
    tq.get_client().put(column(4), partition_id="p")
    assert values(take("p", 1, scores=np.array([0.5, 2.0, 9.0, 1.0]))) == [2]
    assert values(take("p", 1, scores=torch.tensor([0.5, 2.0, 9.0, 1.0]))) == [1]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("NoSuchSampler", "Could not find sampler"),
        ("no_such_module:Mine", "cannot import 'no_such_module'"),
        (Failing, "cannot open nowhere"),
        ("TokenBudgetSampler", "token_budget"),
        (tq.BaseSampler, "abstract"),
        (7, "controller.sampler"),
    ],
)
def test_init_refuses_a_wrong_sampler_before_it_starts_anything(sampler: Any, message: str) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises((ConfigError, TypeError), match=message):
        tq.init({"controller": {"sampler": sampler}, "backend": SIMPLE})
    assert {child.pid for child in psutil.Process().children()} == before


def test_tq_up_refuses_wrong_sampler_arguments_before_it_starts_anything(tmp_path: Path) -> None:
    queue = QueueCommand(tmp_path, {"simple": {}})
    for args in ({"token_budget": -1}, {}, {"budget": 3}):
        queue.resource["spec"]["controller"]["sampler"] = {"name": "TokenBudgetSampler", "args": args}
        queue.write()
        done = queue.up(sys.executable, "-c", "print('ran')")
        assert done.returncode != 0
        assert "sampler.args: TokenBudgetSampler(" in done.stderr, done.stderr
        assert "token_budget" in done.stderr
        assert "ran" not in done.stdout
        assert "controller at" not in done.stderr


@pytest.fixture(scope="module")
def unruly() -> Iterator[Stack]:
    with running_stack(units=1, sampler={"name": f"{Unruly.__module__}:Unruly"}) as stack:
        yield stack


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "Unruly raised LookupError: no such thing"),
        ("exit", "Unruly raised SystemExit"),
        ("unknown", "not in the ready list"),
        ("many", "4 rows for a batch of 2"),
        ("twice", "repeated rows"),
        ("words", "list of int"),
        ("one", r"must return \(sampled, consumed\)"),
    ],
)
def test_faulty_answers_reach_their_caller_and_nobody_else(
    unruly: Stack, local: None, partition: str, what: str, message: str
) -> None:
    tq.init({"controller": {"addresses": [unruly.address]}})
    other = tq.TransferQueueClient("other", unruly.address)
    try:
        tq.get_client().put(column(4), partition_id=partition)
        with pytest.raises(SamplerError, match=message):
            take(partition, 2, what=what)
        assert len(other.get_meta(["x"], 4, partition, task_name="t")) == 4
    finally:
        other.close()


def test_samplers_by_tags_serve_clients(local: None) -> None:
    tq.init({"controller": {"sampler": tq.TokenBudgetSampler(100)}, "backend": SIMPLE})
    tags = [{"total_lengths": 40}, {"total_lengths": 50}, {"total_lengths": 30}]
    tq.kv_batch_put(["a", "b", "c"], "p", column(3), tags)
    assert values(take("p", 8)) == [0, 1]
    with pytest.raises(TimeoutError, match="hold 30 of 100 tokens"):
        take("p", 8, timeout=0.1)
    assert values(take("p", 8, flush=True)) == [2]


def test_replay_returns_rows_again_and_again(local: None) -> None:
    tq.init({"controller": {"sampler": tq.ReplaySampler(min_rows=3)}, "backend": SIMPLE})
    tq.kv_batch_put(["a", "b", "c"], "p", column(3), [{"weight": 0}, {"weight": 2}, {}])
    drawn = values(take("p", 32))
    assert len(drawn) == 32
    assert set(drawn) == {1, 2}
    assert set(values(take("p", 32))) == {1, 2}


SCRIPT = """
import transfer_queue as tq

def newest(rows, count):
    return rows[::-1][:count]

class Newest(tq.BaseSampler):
    def __init__(self, count):
        super().__init__()
        self.limit = count

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        chosen = newest(ready_indexes, min(batch_size, self.limit))
        return chosen, chosen

if __name__ == "__main__":
    import torch
    from tensordict import TensorDict

    tq.init({"controller": {"sampler": Newest(2)}, "backend": {"SimpleStorage": {"unit_capacity": "16Mi"}}})
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(6)}, [6]), partition_id="p")
    print(client.get_data(client.get_meta(["x"], 2, "p", task_name="t"))["x"].tolist())
    tq.close()
"""


def test_init_takes_a_sampler_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != "TQ_CONTROLLER_ADDRESS"}
    done = preloaded.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "[5, 4]\n"), done.stderr


def test_init_takes_a_sampler_class_of_a_function_and_refuses_what_cannot_be_pickled(local: None) -> None:
    class Last(BaseSampler):
        guard: Any = None

        def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            return ready_indexes[-batch_size:], ready_indexes[-batch_size:]

    guarded = Last()
    guarded.guard = threading.Lock()
    with pytest.raises(ConfigError, match=r"Last cannot be pickled.*lock"):
        tq.init({"controller": {"sampler": guarded}, "backend": SIMPLE})
    tq.init({"controller": {"sampler": Last}, "backend": SIMPLE})
    tq.get_client().put(column(6), partition_id="p")
    assert values(take("p", 2)) == [4, 5]


def test_groups_that_tasks_of_one_process_put_row_by_row_are_warned_of(
    local: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell such rows from those of one loop in the right order, so that they are no error."""
    tq.init(
        {
            "controller": {"sampler": {"name": "GRPOGroupNSampler", "args": {"n_samples_per_prompt": 2}}},
            "backend": SIMPLE,
        }
    )

    async def answer(prompt: str, number: int) -> None:
        await tq.async_kv_put(f"{prompt}.{number}", "single", {"x": torch.ones(1)})

    async def job() -> None:
        await asyncio.gather(*(answer(prompt, number) for number in range(2) for prompt in "ab"))

    tq.kv_batch_put(["c.0", "c.1"], "whole", column(2))
    tq.get_client().put(column(4), partition_id="whole")
    assert "one group" not in caplog.text
    asyncio.run(job())
    (told,) = [record.getMessage() for record in caplog.records]
    assert "rows of one group of partition 'single' came in several puts" in told
    assert "group_tag" in told
