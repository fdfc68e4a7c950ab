"""A full queue, slow readers and greedy writers: who waits, who is told what, and whom it costs."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import TIMING, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.control.commands import ListKeys
from transfer_queue.errors import CapacityError
from transfer_queue.wire.frames import MAGIC
from transfer_queue.wire.messages import ENCODER, Envelope, Hello, Kind, Read, ReadPart

CAPACITY = 16 << 20


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """One unit of 16 MiB."""
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    with running_stack(units=1, capacity="16Mi") as running:
        yield running


@pytest.fixture
def clients(stack: Stack) -> Iterator[list[tq.TransferQueueClient]]:
    made = [tq.TransferQueueClient(name, stack.address) for name in ("greedy", "modest")]
    yield made
    for client in made:
        client.close()


def batch(megabytes: float, rows: int = 8) -> TensorDict:
    return TensorDict({"x": torch.ones(rows, int(megabytes * 1e6) // 4 // rows)}, batch_size=[rows])


def test_the_error_of_a_full_unit_says_who_holds_what(stack: Stack, clients: list[tq.TransferQueueClient]) -> None:
    greedy, modest = clients
    modest.put(batch(1), partition_id="p")
    for _ in range(2):
        greedy.put(batch(6), partition_id="p")
    with pytest.raises(CapacityError, match=r"greedy wrote 12\d{6} bytes in 2 blocks; modest wrote 1\d{6} bytes in 1"):
        modest.put(batch(6), partition_id="p")


def test_the_error_names_readers_that_still_look_at_cleared_rows(
    stack: Stack, clients: list[tq.TransferQueueClient]
) -> None:
    greedy, modest = clients
    metas = [modest.put(batch(7), partition_id="p") for _ in range(2)]
    views = [greedy.get_data(meta, zero_copy=True) for meta in metas]
    modest.clear_partition("p")
    wait_until(lambda: modest.get_partition_list() == [], "partition is gone")
    with pytest.raises(CapacityError, match=r"14\d{6} bytes are cleared rows still in use by greedy"):
        modest.put(batch(7), partition_id="p")
    assert views[1]["x"].is_nested


def test_free_bytes_between_rows_that_stay_and_views_in_use_take_a_put(
    stack: Stack, clients: list[tq.TransferQueueClient]
) -> None:
    writer, reader = clients
    metas = [
        writer.put(TensorDict({"x": torch.full((8, 31_250), float(n))}, [8]), partition_id=f"p{n}") for n in range(16)
    ]
    views = [reader.get_data(metas[n], zero_copy=True) for n in (4, 5)]
    for n in range(0, 16, 2):
        writer.clear_partition(f"p{n}")
    wait_until(lambda: len(writer.get_partition_list()) == 8, "every other block is cleared")
    wait_until(lambda: stack.used() < 10e6, "their memory is free")  # but for that of the view of p4
    rows = torch.arange(750_000.0).view(8, -1)
    meta = writer.put(TensorDict({"x": rows, "y": torch.arange(8)}, [8]), partition_id="large")
    assert torch.equal(reader.get_data(meta, zero_copy=True)["x"].to_padded_tensor(0), rows)
    assert torch.equal(reader.get_data(meta[2:4])["x"].to_padded_tensor(0), rows[2:4])
    assert [float(view["x"].values().unique()) for view in views] == [4.0, 5.0]
    for n in range(1, 16, 2):
        assert float(reader.get_data(metas[n])["x"].values().unique()) == n
    writer.clear_partition("large")
    wait_until(lambda: stack.used() < 10e6, "all pieces are free again")


def test_a_row_larger_than_every_unit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "86400")
    with running_stack(units=2, capacity="16Mi") as stack:
        client = tq.TransferQueueClient("c", stack.address)
        rows = [torch.ones(1000), torch.ones(5_000_000), torch.ones(10)]
        with pytest.raises(CapacityError, match=r"a row of 20\d{6} bytes exceeds the capacity of every storage unit"):
            client.put(
                TensorDict({"x": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [3]), partition_id="p"
            )
        assert stack.used() == 0
        client.close()


def test_a_put_larger_than_all_storage_is_refused_before_anything_is_stored(
    stack: Stack, clients: list[tq.TransferQueueClient]
) -> None:
    with pytest.raises(CapacityError, match="exceeds the capacity of all storage units together"):
        clients[0].put(batch(17), partition_id="p")
    assert stack.used() == 0
    assert clients[0].get_partition_list() == []


def test_a_put_that_finds_no_room_leaves_nothing_and_names_the_wait(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "0.5")
    client = tq.TransferQueueClient("waiter", stack.address)
    client.put(batch(7), partition_id="p")
    before = stack.used()
    with pytest.raises(CapacityError, match="capacity"):
        client.put(batch(14), partition_id="q")
    wait_until(lambda: stack.used() == before, "parts of the refused put are freed")
    assert client.get_partition_list() == ["p"]
    client.close()


def test_waiting_puts_of_many_threads_go_on_one_after_the_other_as_room_is_made(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "60")
    writer, cleaner = (tq.TransferQueueClient(name, stack.address) for name in ("writer", "cleaner"))
    count = 100  # more than may wait at the unit, and five times what fits
    with ThreadPoolExecutor(count) as pool:
        puts = [pool.submit(writer.put, batch(0.8), partition_id=f"p{number}") for number in range(count)]
        cleared: set[str] = set()
        while len(cleared) < count:
            found = wait_until(cleaner.get_partition_list, "another put is done", 60)
            for name in found:
                cleaner.clear_partition(name)
            cleared.update(found)
        assert all(len(put.result()) == 8 for put in puts)
    wait_until(lambda: stack.used() == 0, "everything is freed")
    writer.close()
    cleaner.close()


def test_small_puts_get_through_while_a_large_one_waits(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "60")
    greedy, modest = (tq.TransferQueueClient(name, stack.address) for name in ("greedy", "modest"))
    greedy.put(batch(7), partition_id="first")
    waiting = threading.Thread(target=greedy.put, args=(batch(14),), kwargs={"partition_id": "large"})
    waiting.start()
    for number in range(20):
        modest.put(batch(0.01), partition_id=f"small{number}")
    assert waiting.is_alive()
    for name in modest.get_partition_list():
        modest.clear_partition(name)
    waiting.join(60)
    assert modest.get_partition_list() == ["large"]
    greedy.close()
    modest.close()


def test_a_reader_that_takes_no_answers_costs_only_itself(stack: Stack, clients: list[tq.TransferQueueClient]) -> None:
    """It asks for 12 GB of gathered rows and reads none: the unit neither collects them nor keeps others waiting."""
    client = clients[0]
    put = client.put(batch(6, rows=3000), partition_id="p")
    located = client.get_meta(["x"], 3000, "p", task_name="t")._located
    assert located is not None
    unit = psutil.Process(stack.units[0].process.pid)
    before = unit.memory_info().rss
    host, port = stack.units[0].ready["address"].rsplit(":", 1)
    read = Read([ReadPart(located.locations[0].blocks[0], ["x"], scattered())])
    with socket.create_connection((host, int(port))) as stuck:
        stuck.sendall(message(0, Hello("client", "stuck")))
        stuck.settimeout(0.5)  # the unit stops reading, and the socket fills
        requests = b"".join(message(number, read) for number in range(1, 4000))
        with pytest.raises(TimeoutError):
            stuck.sendall(requests)
        for _ in range(20):
            assert client.get_data(put)["x"].size(0) == 3000
        assert unit.memory_info().rss - before < 400e6
    wait_until(lambda: client.get_data(put)["x"].size(0) == 3000, "the unit serves on")


def scattered() -> bytes:
    """i32 bytes of every other row: such rows are gathered into memory of their own."""
    return torch.arange(0, 3000, 2, dtype=torch.int32).numpy().tobytes()


def message(number: int, body: msgspec.Struct) -> bytes:
    header = ENCODER.encode(Envelope(Kind.REQUEST, number, 0, body))
    return MAGIC.to_bytes(4, "little") + len(header).to_bytes(4, "little") + bytes(8) + header


def ask_for_listings(link: socket.socket, name: str, asked: int) -> None:
    link.sendall(message(1, Hello("client", name)))
    link.sendall(b"".join(message(number, ListKeys("p")) for number in range(2, 2 + asked)))


def read_listings(link: socket.socket, asked: int, least: int) -> None:
    """Read answers until ``asked`` of them have more than ``least`` bytes."""
    with link.makefile("rb") as answers:
        found = 0
        while found < asked:
            _, size, _ = struct.unpack("<IIQ", answers.read(16))
            found += size > least
            answers.read(size)


@pytest.fixture
def patient() -> Iterator[Stack]:
    """Its controller does not take a client for gone that reads nothing for as long as a busy machine needs."""
    with running_stack(units=1, capacity="16Mi", timing={**TIMING, "peerTimeout": 120.0}) as running:
        yield running


def test_listings_that_a_client_does_not_read_do_not_pile_up(patient: Stack) -> None:
    """They travel in headers, and many requests come with one read of the socket."""
    writer = tq.TransferQueueClient("writer", patient.address)
    writer.run(writer.kv.put, [f"k{number}" for number in range(100)], "p", None, [{"text": "x" * 100_000}] * 100, None)
    memory = psutil.Process(patient.controller.process.pid).memory_info
    before, asked = memory().rss, 60
    host, port = patient.address.rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=60) as link:
        ask_for_listings(link, "slow", asked)
        for _ in range(20):
            writer.run(writer.kv.list_keys, "p")  # others are served
        assert memory().rss - before < 256 << 20
        read_listings(link, asked, 10_000_000)
    writer.close()


def test_many_clients_that_do_not_read_their_listings_share_one_bound(patient: Stack) -> None:
    writer = tq.TransferQueueClient("writer", patient.address)
    writer.run(writer.kv.put, [f"k{number}" for number in range(100)], "p", None, [{"text": "x" * 10_000}] * 100, None)
    memory = psutil.Process(patient.controller.process.pid).memory_info
    before, asked = memory().rss, 40
    host, port = patient.address.rsplit(":", 1)
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(40)]
        for number, link in enumerate(links):  # 40 listings of 1 MB for each: 1.6 GB
            ask_for_listings(link, f"slow-{number}", asked)
        for _ in range(20):
            writer.run(writer.kv.list_keys, "p")  # others are served
        assert memory().rss - before < 512 << 20
        for link in links:  # what was held back comes, once it is read
            read_listings(link, asked, 1_000_000)
    writer.close()
