"""Delivery at least once: what was fetched and not acknowledged comes again, what was acknowledged never does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.dataloader import StreamingDataset, mark_end

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(units=1, durability="process", sampler={"name": "SequentialSampler"}) as running:
        yield running


def put(client: tq.TransferQueueClient, partition: str, count: int) -> None:
    client.put(TensorDict({"x": torch.arange(count)}, batch_size=[count]), partition_id=partition)


def fetch(client: tq.TransferQueueClient, partition: str, count: int, lease: float | None) -> tq.BatchMeta:
    return client.get_meta(["x"], count, partition, task_name="train", timeout=DEADLINE_S, lease=lease)


def numbers(client: tq.TransferQueueClient, meta: tq.BatchMeta) -> list[int]:
    found: list[int] = client.get_data(meta)["x"].tolist()
    return found


CONSUMER = """
import sys, time, transfer_queue as tq
client = tq.TransferQueueClient("victim", sys.argv[1])
meta = client.get_meta(["x"], 4, sys.argv[2], task_name="train", timeout=60, lease=float("inf"))
client.ack(meta[:1], "train")
print("took", flush=True)
time.sleep(600)
"""


def test_rows_of_a_killed_consumer_come_again_in_order(stack: Stack, client: tq.TransferQueueClient) -> None:
    put(client, "killed", 6)
    command = [sys.executable, "-c", CONSUMER, stack.address, "killed"]
    with preloaded.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"took\n"
        assert client.get_consumption_status("train", "killed")[1].tolist() == [1, 0, 0, 0, 0, 0]  # type: ignore[union-attr]
        victim.kill()
    assert numbers(client, fetch(client, "killed", 5, math.inf)) == [1, 2, 3, 4, 5]


def test_rows_whose_lease_ran_out_come_again(client: tq.TransferQueueClient) -> None:
    put(client, "late", 2)
    assert numbers(client, fetch(client, "late", 2, 0.2)) == [0, 1]
    again = fetch(client, "late", 2, math.inf)
    assert numbers(client, again) == [0, 1]
    client.ack(again, "train")
    assert client.check_consumption_status("train", "late")


def test_leases_and_acknowledgements_outlive_the_controller(stack: Stack, client: tq.TransferQueueClient) -> None:
    put(client, "restart", 4)
    done, held = fetch(client, "restart", 1, math.inf), fetch(client, "restart", 2, math.inf)
    client.ack(done, "train")
    stack.controller.kill()
    stack.restart_controller()
    assert numbers(client, fetch(client, "restart", 1, math.inf)) == [3]  # the others are taken, still
    client.ack(held, "train")
    client.ack(held, "train")  # once more changes nothing
    assert client.get_consumption_status("train", "restart")[1].tolist() == [1, 1, 1, 0]  # type: ignore[union-attr]


def test_a_late_acknowledgement_spares_the_rows_another_delivery(client: tq.TransferQueueClient) -> None:
    put(client, "spared", 2)
    meta = fetch(client, "spared", 1, 0.05)
    wait_until(lambda: client.get_meta(["x"], 2, "spared", task_name="other", timeout=0).size >= 0, "the queue answers")
    client.ack(meta, "train")
    assert numbers(client, fetch(client, "spared", 1, 0)) == [1]


def test_without_a_lease_rows_are_consumed_at_once(client: tq.TransferQueueClient) -> None:
    put(client, "once", 2)
    fetch(client, "once", 2, None)
    assert client.check_consumption_status("train", "once")


def test_a_dataset_acknowledges_a_batch_when_the_next_is_asked_for(
    stack: Stack, client: tq.TransferQueueClient
) -> None:
    put(client, "stream", 4)
    config = client.config

    def dataset() -> StreamingDataset:
        return StreamingDataset(config, 2, 2, ["x"], "stream", "train", 0, lease=math.inf)

    first, second = dataset(), dataset()
    stream = iter(first)
    assert next(stream)[0]["x"].tolist() == [0, 1]
    assert next(stream)[0]["x"].tolist() == [2, 3]  # and so the first batch is acknowledged
    mark_end("stream", client=client)
    first.close()  # in the middle of its second batch
    assert [td["x"].tolist() for td, _ in second] == [[2, 3]]
    assert client.check_consumption_status("train", "stream")
    second.close()


def test_the_queue_may_lease_by_default() -> None:
    with running_stack(units=1, leaseS=0.2) as stack:
        client = tq.TransferQueueClient("tester", stack.address)
        put(client, "p", 2)
        assert client.default_lease == 0.2
        fetch(client, "p", 2, None)
        meta = fetch(client, "p", 2, 0)  # once the first lease is over
        assert numbers(client, meta) == [0, 1]
        assert client.check_consumption_status("train", "p")
        client.close()
