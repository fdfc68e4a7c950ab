"""Streaming datasets and loaders over a real queue, with producers and ranks as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, cast

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.columns.nested import strided_nested
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset, chunk_batch_fn, clear_end, mark_end
from transfer_queue.errors import DataLostError, InvalidInputError, InvalidTypeError, WorkerLostError

_PROCESS_S = 240
"""For programs of a test to end: each imports torch first, which takes long where much else runs."""

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(units=2, capacity="64Mi", sampler={"name": "RankAwareSampler"}) as running:
        yield running


def rows(count: int, start: int = 0) -> TensorDict:
    ragged = torch.nested.as_nested_tensor(
        [torch.full((number % 5,), number) for number in range(start, start + count)], layout=torch.jagged
    )
    return TensorDict({"x": torch.arange(start, start + count), "tokens": ragged}, batch_size=[count])


def put(partition: str, count: int, start: int = 0) -> None:
    tq.get_client().put(rows(count, start), partition_id=partition)


def dataset(partition: str, *, batch: int = 4, micro: int = 2, rank: int = 0, **more: Any) -> StreamingDataset:
    more.setdefault("task_name", "train")
    return StreamingDataset(None, batch, micro, ["x", "tokens"], partition, dp_rank=rank, **more)


def values(stream: Any) -> list[list[int]]:
    return [td["x"].tolist() for td, _ in stream]


def flat(batches: list[list[int]]) -> list[int]:
    return sorted(number for batch in batches for number in batch)


class Programs:
    """Python programs attached to the queue, each a process of its own."""

    def __init__(self, stack: Stack) -> None:
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_ADDRESS": stack.address}
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.started.append(preloaded.Popen(command, env=self.environ, stdout=subprocess.PIPE, text=True))
        return self.started[-1]


@pytest.fixture
def python(queue: Stack) -> Iterator[Programs]:
    programs = Programs(queue)
    yield programs
    for program in programs.started:
        program.kill()
        program.wait()
        if program.stdout is not None:
            program.stdout.close()


PRODUCER = """
import sys, torch, transfer_queue as tq
from tensordict import TensorDict
from transfer_queue.dataloader import mark_end
partition, name, producers, first = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tq.init()
for start in range(first, first + 30, 3):
    x = torch.arange(start, start + 3)
    tokens = torch.nested.as_nested_tensor([torch.full((n % 5,), n) for n in x.tolist()], layout=torch.jagged)
    tq.get_client().put(TensorDict({"x": x, "tokens": tokens}, batch_size=[3]), partition_id=partition)
mark_end(partition, name, producers)
"""

CONSUMER = """
import json, sys, transfer_queue as tq
from concurrent.futures import ThreadPoolExecutor
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
partition, rank = sys.argv[1], int(sys.argv[2])
conf = tq.init()
def consume(task):
    seen = []
    for td, meta in StreamingDataLoader(StreamingDataset(conf, 4, 2, ["x", "tokens"], partition, task, rank)):
        assert [len(row) for row in td["tokens"].unbind()] == [n % 5 for n in td["x"].tolist()]
        seen.append(td["x"].tolist())
    return seen
with ThreadPoolExecutor(2) as pool:
    print(json.dumps(dict(zip(("actor", "critic"), pool.map(consume, ("actor", "critic"))))))
"""


def test_two_ranks_with_two_tasks_share_the_rows_of_two_producers(python: Programs, partition: str) -> None:
    """Each task sees every row once over its ranks; two processes of a rank see equal batches in order."""
    consumers = [python(CONSUMER, partition, rank) for rank in (0, 1, 1)]
    producer = python(PRODUCER, partition, "other", 2, 0)
    for start in range(30, 60, 5):
        put(partition, 5, start)
    mark_end(partition, "this", 2)
    assert producer.wait(_PROCESS_S) == 0
    first, second, twin = [json.loads(process.communicate(timeout=_PROCESS_S)[0]) for process in consumers]
    assert second == twin
    for task in ("actor", "critic"):
        assert flat(first[task] + second[task]) == list(range(60))


def test_the_last_short_batch_is_delivered_once_the_end_is_marked(queue: Stack, partition: str) -> None:
    put(partition, 7)
    mark_end(partition)
    assert values(dataset(partition)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert values(dataset(partition, task_name="other", batch=8, micro=8)) == [list(range(7))]


def test_a_slow_producer_does_not_end_the_stream_early(queue: Stack, partition: str) -> None:
    """The consumer has all that exists and goes on waiting until the last of two producers marked the end."""
    seen: list[int] = []

    def consume() -> None:
        for td, _ in dataset(partition):
            seen.extend(td["x"].tolist())

    with ThreadPoolExecutor(1) as pool:
        consumer = pool.submit(consume)
        put(partition, 4)
        mark_end(partition, "a", 2)
        wait_until(lambda: len(seen) == 4, "the first batch is consumed")
        wait_until(lambda: queue.controller.metric("tq_controller_waiting") == 1, "the consumer asks for more")
        wait_until(lambda: queue.controller.metric("tq_controller_waiting") == 0, "and did not get it")
        assert not consumer.done()
        put(partition, 5, 4)
        mark_end(partition, "b", 2)
        consumer.result(30)
    assert seen == list(range(9))


def test_a_total_ends_the_stream_without_a_mark(queue: Stack, partition: str) -> None:
    put(partition, 20)
    assert values(dataset(partition, total_samples=6)) == [[0, 1], [2, 3], [4, 5]]
    assert values(dataset(partition, rank=1, total_samples=6)) == [[6, 7], [8, 9], [10, 11]]
    assert tq.get_client().get_consumption_status("train", partition)[1].sum() == 12


def test_an_end_before_the_total_is_an_error(queue: Stack, partition: str) -> None:
    put(partition, 6)
    mark_end(partition)
    with pytest.raises(RuntimeError, match=r"2 rows left.*total_samples=8"):
        values(dataset(partition, total_samples=8))


def test_cleared_rows_do_not_keep_a_stream_from_ending(queue: Stack, partition: str) -> None:
    put(partition, 8)
    mark_end(partition)
    seen = []
    for td, meta in dataset(partition):
        seen += td["x"].tolist()
        tq.get_client().clear_samples(meta)
    assert seen == list(range(8))


def test_checking_consumption_ends_once_all_that_exists_is_consumed(queue: Stack, partition: str) -> None:
    put(partition, 8)
    assert values(dataset(partition, should_check_consumption_status=True)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_mark_can_be_taken_back(queue: Stack, partition: str) -> None:
    mark_end(partition)
    assert values(dataset(partition)) == []
    clear_end(partition)
    put(partition, 4)
    with ThreadPoolExecutor(1) as pool:
        consumer = pool.submit(values, dataset(partition))
        wait_until(lambda: queue.controller.metric("tq_controller_waiting") == 1, "the consumer waits for more")
        mark_end(partition)
        assert consumer.result(30) == [[0, 1], [2, 3]]


def test_rows_that_were_lost_before_the_end_are_an_error_of_the_loader() -> None:
    with running_stack(units=1) as stack:
        client = tq.TransferQueueClient("producer", stack.address)
        client.put(rows(8), partition_id="p")
        mark_end("p", client=client)
        stack.units[0].kill()
        stack.add_unit("u1")
        wait_until(lambda: client.run(client.rows.partition_counts, "p")["lost"] == 8, "the rows are lost")
        stream = StreamingDataset({"controller": {"addresses": [stack.address]}}, 4, 4, ["x"], "p", "t", 0)
        with pytest.raises(DataLostError, match="8 rows are lost with their storage unit; clear the partition"):
            values(stream)
        stream.close()
        client.close()


def test_polling_mode_waits_too() -> None:
    with running_stack(units=1, pollingMode=True, sampler={"name": "RankAwareSampler"}) as stack:
        client = tq.TransferQueueClient("producer", stack.address)
        conf = {"controller": {"addresses": [stack.address]}}
        stream = StreamingDataset(conf, 4, 4, ["x"], "p", "t", 0)
        with ThreadPoolExecutor(1) as pool:
            consumer = pool.submit(values, stream)
            client.put(rows(6), partition_id="p")
            wait_until(lambda: len(stream.buffer) == 1, "one batch is there")
            assert not consumer.done()
            mark_end("p", client=client)
            assert consumer.result(30) == [[0, 1, 2, 3], [4, 5]]
        stream.close()
        client.close()


def test_reset_replays_and_step_moves_on_also_within_the_loop(queue: Stack, partition: str) -> None:
    put(partition, 4)
    put(partition + "next", 4, 10)
    loader = StreamingDataLoader(dataset(partition))
    stream = iter(loader)
    assert [next(stream)[0]["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert [td["x"].tolist() for td, _ in loader.get_buffer()] == [[0, 1, 2, 3]]
    loader.reset()
    assert [next(stream)[0]["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    loader.step(partition + "next")
    assert loader.get_buffer() == []
    assert next(stream)[0]["x"].tolist() == [10, 11]
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stopped_stream_resumes_in_another_loader_with_the_next_micro_batch(
    queue: Stack, partition: str, workers: int
) -> None:
    """Also what workers had fetched ahead is delivered, and the order is that of a stream that never stopped."""
    put(partition, 30)
    mark_end(partition)
    reference = values(StreamingDataLoader(dataset(partition, batch=5, task_name="reference"), num_workers=workers))
    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for stop in (4, 7, 100):
        loader = StreamingDataLoader(dataset(partition, batch=5), num_workers=workers)
        if state is not None:
            loader = StreamingDataLoader(dataset(partition, batch=5), num_workers=(workers + 1) % 3)
            loader.load_state_dict(json.loads(json.dumps(state)))
        for td, _ in loader:
            seen.append(td["x"].tolist())
            if len(seen) == stop:
                break
        state = loader.state_dict()
    assert flat(seen) == list(range(30))
    assert seen == reference
    with pytest.raises(ValueError, match="dp_rank 0"):
        dataset(partition, batch=5, rank=1).load_state_dict(state)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_collate_and_prefetch(queue: Stack, partition: str, method: str) -> None:
    put(partition, 16)
    mark_end(partition)
    loader = StreamingDataLoader(
        dataset(partition),
        num_workers=2,
        collate_fn=with_pid,
        prefetch_factor=3,
        multiprocessing_context=method,
    )
    got = list(loader)
    assert [number for numbers, _ in got for number in numbers] == list(range(16))
    assert os.getpid() not in {pid for _, pid in got}


def with_pid(sample: tuple[TensorDict, tq.BatchMeta]) -> tuple[list[int], int]:
    assert sample[0]["x"].shape == (sample[1].size,)
    return sample[0]["x"].tolist(), os.getpid()


def test_a_killed_worker_is_an_error_and_loses_nothing(queue: Stack, partition: str) -> None:
    put(partition, 40)
    mark_end(partition)
    loader = StreamingDataLoader(dataset(partition), num_workers=2, collate_fn=with_pid)
    seen: list[int] = []

    def consume(limit: int, after: Callable[[int], None]) -> None:
        for numbers, pid in loader:
            seen.extend(numbers)
            if len(seen) >= limit:
                after(pid)

    with pytest.raises(WorkerLostError, match="iterate again"):
        consume(10, lambda pid: os.kill(pid, signal.SIGKILL))
    assert len(seen) < 40
    consume(1000, lambda pid: None)
    assert sorted(seen) == list(range(40))


def test_breaking_off_ends_starved_workers_at_once(queue: Stack, partition: str) -> None:
    put(partition, 4)
    loader = StreamingDataLoader(dataset(partition), num_workers=2, collate_fn=with_pid)
    stream = iter(loader)
    pids = {next(stream)[1] for _ in range(2)}
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the workers are gone")
    wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("QueueFeeder")],
        "the threads that fed the workers are gone",
    )


def test_starved_workers_end_with_a_killed_parent(queue: Stack, python: Programs, partition: str) -> None:
    code = """
import os, sys, transfer_queue as tq
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
stream = StreamingDataset(tq.init(), 4, 2, ["x"], sys.argv[1], "t", 0)
def pid(worker):
    print(os.getpid(), flush=True)
for _ in StreamingDataLoader(stream, num_workers=1, worker_init_fn=pid):
    pass
"""
    parent = python(code, partition)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    wait_until(lambda: queue.controller.metric("tq_controller_waiting") == 1, "the worker waits for rows")
    parent.kill()
    parent.communicate()
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"), "the worker is gone")


def test_errors_of_the_queue_reach_the_consumer_from_a_worker(queue: Stack, partition: str) -> None:
    put(partition, 4)
    stream = dataset(partition)
    assert len(values(iter_some(stream, 2))) == 2
    tq.get_client().clear_partition(partition)
    put(partition, 1)
    stream.load_state_dict({**stream.state_dict(), "cursor": [0, 0]})
    mark_end(partition)
    assert values(StreamingDataLoader(stream, num_workers=1)) == [[0]]  # deals of the former partition are gone with it
    bad = dataset(partition, task_name="bad", fetch_batch_fn=failing_fetch)
    with pytest.raises(tq.TransferQueueError, match="no luck"):
        values(StreamingDataLoader(bad, num_workers=1))


def iter_some(stream: StreamingDataset, count: int) -> Iterator[Any]:
    iterator = iter(stream)
    for _ in range(count):
        yield next(iterator)


def failing_fetch(**arguments: Any) -> Any:
    assert sorted(arguments) == [
        "batch_index",
        "batch_size",
        "data_fields",
        "partition_id",
        "sampling_config",
        "task_name",
        "tq_client",
    ]
    raise tq.TransferQueueError("no luck")


def test_arguments_out_of_range_are_named() -> None:
    for wrong in ({"micro_batch_size": 0}, {"dp_rank": -1}, {"data_fields": []}, {"batch_size": 0}):
        good = {"batch_size": 4, "micro_batch_size": 2, "data_fields": ["x"], "dp_rank": 0}
        arguments: dict[str, Any] = {**good, **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StreamingDataset(None, partition_id="p", task_name="t", **arguments)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (None, "state must be a dict"),
        ({"cursor": None}, "cursor of state"),
        ({"cursor": [1]}, "cursor"),
        ({"cursor": [-1, 0]}, "cursor"),
        ({"cursor": ["a", "b"]}, "cursor of state"),
        ({"partition_id": None}, "partition_id"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(wrong: dict[str, Any] | None, text: str) -> None:
    stream = StreamingDataset(None, 4, 2, ["x"], "p", "t", 0)
    before, state = stream.state_dict(), {**stream.state_dict(), "partition_id": "q", "cursor": [3, 1]}
    with pytest.raises((InvalidInputError, InvalidTypeError), match=text):
        stream.load_state_dict(cast(Any, wrong if wrong is None else {**state, **wrong}))
    assert stream.state_dict() == before
    stream.load_state_dict(state)
    assert stream.state_dict() == state


def test_pieces_of_a_batch_keep_rows_tags_and_layouts() -> None:
    ragged = [torch.arange(n) for n in (1, 3, 0, 2, 4)]
    td = TensorDict(
        {
            "dense": torch.arange(10).reshape(5, 2),
            "jagged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "strided": strided_nested([row.float() for row in ragged]),
            "text": NonTensorStack("a", "b", "c", "d", "e"),
        },
        batch_size=[5],
    )
    meta = tq.BatchMeta(list(range(5)), ["p"] * 5, custom_meta=[{"n": n} for n in range(5)])
    with pytest.raises(InvalidTypeError, match="batch_meta must be a BatchMeta"):
        chunk_batch_fn(td, cast(Any, None), 2)
    pieces = chunk_batch_fn(td, meta, 2)
    assert len(chunk_batch_fn(td, batch_meta=meta)) == len(meta)
    assert [piece.batch_size[0] for piece, _ in pieces] == [2, 2, 1]
    assert [tag["n"] for _, part in pieces for tag in part.custom_meta] == [0, 1, 2, 3, 4]
    for name in ("jagged", "strided"):
        assert {piece[name].layout for piece, _ in pieces} == {td[name].layout}
        assert [row.tolist() for piece, _ in pieces for row in piece[name].unbind()] == [r.tolist() for r in ragged]
    assert [text for piece, _ in pieces for text in piece["text"]] == list("abcde")
    assert torch.cat([piece["dense"] for piece, _ in pieces]).equal(td["dense"])
    with pytest.raises(ValueError, match="larger"):
        chunk_batch_fn(td, meta, 6)
    with pytest.raises(TypeError, match="TensorDict"):
        chunk_batch_fn({}, meta, 1)  # type: ignore[arg-type]


class Torn:
    """Numbers that cannot be received the first time, as their worker is about to die."""

    torn: ClassVar[bool] = False

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        return receive_torn, (self.numbers, os.getpid())


def receive_torn(numbers: list[int], pid: int) -> list[int]:
    if not Torn.torn:
        Torn.torn = True
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        raise ConnectionResetError("Connection reset by peer")
    return numbers


def torn(sample: tuple[TensorDict, tq.BatchMeta]) -> Torn:
    return Torn(sample[0]["x"].tolist())


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named_as_lost(queue: Stack, partition: str) -> None:
    put(partition, 8)
    mark_end(partition)
    loader = StreamingDataLoader(dataset(partition), num_workers=1, collate_fn=torn)
    with pytest.raises(WorkerLostError, match="iterate again"):
        next(iter(loader))
    assert [number for numbers in loader for number in numbers] == list(range(8))


def test_the_death_of_a_worker_is_told_to_who_iterates_and_interrupts_nobody_else(queue: Stack, partition: str) -> None:
    put(partition, 4)  # and no end: the worker waits for more
    loader = StreamingDataLoader(dataset(partition), num_workers=1, collate_fn=pid_of_worker)
    with ThreadPoolExecutor(1) as pool:
        iterator = iter(loader)
        pid = next(iterator)  # in this thread: there torch installs its handler
        assert next(iterator) == pid  # the rest of the batch
        waiting = pool.submit(next, iterator)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="iterate again"):  # not torch's error, at some line of this thread
            waiting.result(_PROCESS_S)
        pool.submit(iterator.close).result(_PROCESS_S)


def pid_of_worker(sample: Any) -> int:
    return os.getpid()


def test_a_put_that_says_is_last_ends_the_stream(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(partition, 4)
    tq.get_client().put(rows(3, 4), partition_id=partition, is_last=True)
    assert flat(values(dataset(partition))) == list(range(7))
    assert caplog.messages == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_that_yields_nothing_says_once_why(
    queue: Stack, partition: str, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    tq.get_client().put(rows(4), partition_id=partition, is_last=True)
    stream = dataset(partition)
    loader = StreamingDataLoader(stream, num_workers=workers)
    assert values(loader) == [[0, 1], [2, 3]]
    assert not caplog.records
    assert values(loader) == values(loader) == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"task 'train' has taken all rows of partition '{partition}'; reset_consumption(" in said


def test_torchs_own_loader_is_refused_with_the_one_to_use(queue: Stack, partition: str) -> None:
    put(partition, 4)
    with pytest.raises(InvalidTypeError, match=r"StreamingDataLoader\(dataset\)"):
        next(iter(torch.utils.data.DataLoader(dataset(partition))))


def test_a_dataset_that_waits_says_what_for(
    queue: Stack, partition: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transfer_queue.dataloader.streaming_dataset._STALL_WARNING_S", 0.01)
    with ThreadPoolExecutor(3) as pool:

        def wait_for(words: str) -> None:
            """Of a dataset that begins now."""
            pool.submit(next, iter(dataset(partition, task_name=words)))
            wait_until(lambda: words in caplog.text, f"a dataset says that {words}")

        try:
            wait_for("there is no such partition")
            tq.get_client().put(TensorDict({"x": torch.zeros(2)}, [2]), partition_id=partition)
            wait_for("no row of it has the fields ['tokens']")
            put(partition, 1)
            wait_for("it has 3 rows, 3 not consumed, 1 of these with all fields")
        finally:
            put(partition, 3)  # each has a batch now
