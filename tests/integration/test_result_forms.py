"""Reading as views of the stored rows, into tensors that exist, and to a device."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.client.operation import Operation
from transfer_queue.columns.recycling import RecycledMemory
from transfer_queue.errors import CapacityError, InvalidInputError, InvalidTypeError

ROWS = 8
WIDTH = 50_000


def dense(rows: int = ROWS, width: int = WIDTH) -> TensorDict:
    return TensorDict({"x": torch.arange(rows * width, dtype=torch.int64).view(rows, width)}, batch_size=[rows])


def keys(rows: int = ROWS) -> list[str]:
    return [f"k{row}" for row in range(rows)]


def ragged(lengths: list[int]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n, dtype=torch.float32) for n in lengths], layout=torch.jagged)


LENGTHS = [2] * (ROWS - 1) + [3]


@pytest.fixture(params=[True, False], ids=["shared memory", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A stack of its own with one unit of 16 MiB, to which this process is attached."""
    monkeypatch.setenv("TQ_PUT_WAIT", "60")
    with running_stack(units=1, capacity="16Mi", settings={"sharedMemory": request.param}) as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        yield stack
        tq.close()


def test_views_stay_as_they_are_though_their_rows_are_cleared_and_overwritten(transport: Stack) -> None:
    data = dense()
    tq.kv_batch_put(keys(), "p", data)
    views = tq.kv_batch_get(keys(), "p", zero_copy=True)["x"]
    tq.kv_clear(keys(), "p")
    for _ in range(6):  # more than the arena holds
        tq.kv_batch_put(keys(), "p", TensorDict({"x": torch.full((ROWS, WIDTH), -1)}, batch_size=[ROWS]))
        tq.kv_clear(keys(), "p")
    assert torch.equal(views.values().view(ROWS, WIDTH), data["x"])


def test_one_tensor_of_several_keeps_its_rows_and_the_last_one_gives_them_back(transport: Stack) -> None:
    data = TensorDict({"x": dense()["x"], "y": dense()["x"] + 1}, batch_size=[ROWS])
    tq.kv_batch_put(keys(), "p", data)
    batch = tq.kv_batch_get(keys(), "p", zero_copy=True)
    rest = batch["y"].values()[:WIDTH]
    tq.kv_clear(keys(), "p")
    del batch
    gc.collect()
    assert torch.equal(rest, data["y"][0])
    del rest
    gc.collect()
    wait_until(lambda: transport.used() == 0, "memory of views is recycled")


def test_views_are_of_the_stored_memory_and_copies_are_not(queue: Stack, partition: str) -> None:
    tq.kv_batch_put(keys(), partition, dense())
    pointers = {tq.kv_batch_get(keys(), partition, zero_copy=True)["x"].values().data_ptr() for _ in range(2)}
    assert len(pointers) == 1
    first, second = (tq.kv_batch_get(keys(), partition)["x"].values() for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    tq.get_client().clear_partition(partition)


@pytest.mark.parametrize("transport", [False], indirect=True, ids=["tcp"])
def test_what_came_over_tcp_stays_where_it_was_received_and_a_small_column_does_not_keep_it(
    transport: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RecycledMemory()
    monkeypatch.setattr("transfer_queue.storage.memory.client.empty_bytes", memory.take)
    data = TensorDict({"x": dense()["x"], "reward": torch.arange(ROWS)}, batch_size=[ROWS])
    tq.kv_batch_put(keys(), "p", data)
    batch = tq.kv_batch_get(keys(), "p")
    place, reward = batch["x"].values().data_ptr(), batch["reward"]
    batch["x"].values().zero_()  # the reader's own memory
    assert memory.idle_bytes == 0
    del batch
    gc.collect()
    assert memory.idle_bytes > data["x"].nbytes
    again = tq.kv_batch_get(keys(), "p")
    assert torch.equal(again["x"].values().view(ROWS, WIDTH), data["x"])
    assert again["x"].values().data_ptr() == place
    assert torch.equal(reward, data["reward"])


def test_who_holds_views_takes_room_and_others_read_and_write_in_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PUT_WAIT", "0")
    with running_stack(units=1, capacity="16Mi") as stack:
        holder, other = (tq.TransferQueueClient(name, stack.address) for name in ("holder", "other"))
        big = dense(ROWS, 110_000)  # 7 MB, of which two fit
        views = [holder.get_data(holder.put(big, partition_id="held"), zero_copy=True)["x"] for _ in range(2)]
        holder.clear_partition("held")
        with pytest.raises(CapacityError):
            other.put(big, partition_id="p")
        small = dense(ROWS, 1000)
        back = other.get_data(other.put(small, partition_id="p"))
        assert torch.equal(back["x"].values().view(ROWS, 1000), small["x"])
        assert all(torch.equal(view.values().view(ROWS, -1), big["x"]) for view in views)
        views.clear()
        gc.collect()
        wait_until(lambda: stack.used() < 1e6, "views are given back")
        other.put(big, partition_id="p")
        holder.close()
        other.close()


def test_views_outlive_their_client_and_the_memory_is_given_back_after_them() -> None:
    with running_stack(units=1, capacity="16Mi") as stack:
        client, other = (tq.TransferQueueClient(name, stack.address) for name in ("reader", "other"))
        data = dense()
        views = client.get_data(client.put(data, partition_id="p"), zero_copy=True)["x"]
        client.close()
        other.clear_partition("p")
        assert torch.equal(views.values().view(ROWS, WIDTH), data["x"])
        assert stack.used() > 0
        del views, client
        gc.collect()
        wait_until(lambda: stack.used() == 0, "memory of the lost reader's views is recycled")
        other.close()


def test_views_outlive_a_lost_connection_and_the_memory_is_given_back_after_them() -> None:
    with running_stack(units=1, capacity="16Mi") as stack:
        client = tq.TransferQueueClient("reader", stack.address)
        data = dense()
        stored = client.put(data, partition_id="p")
        views = client.get_data(stored, zero_copy=True)["x"]

        async def lose() -> None:
            for connection in list(client.engine._backend.connections):
                connection.abort("cut off by the test")

        client.run(lambda: Operation(lose(), lambda done: done))
        again = client.get_data(stored, zero_copy=True)["x"]  # over another connection
        client.clear_partition("p")
        assert all(torch.equal(each.values().view(ROWS, WIDTH), data["x"]) for each in (views, again))
        del views, again
        gc.collect()
        wait_until(lambda: stack.used() == 0, "memory of both connections' views is recycled")
        client.close()


def test_rows_of_many_blocks_come_as_copies_in_the_asked_order(queue: Stack, partition: str) -> None:
    data = dense()
    for row in range(ROWS):
        tq.kv_batch_put([f"k{row}"], partition, data[row : row + 1])
    back = tq.kv_batch_get(keys()[::-1], partition, zero_copy=True)["x"]
    assert torch.equal(back.values().view(ROWS, WIDTH), data["x"].flip(0))
    tq.get_client().clear_partition(partition)


@pytest.mark.parametrize("scattered", [False, True], ids=["one block", "two blocks"])
def test_out_is_filled_and_returned(queue: Stack, partition: str, scattered: bool) -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    data = TensorDict(
        {"x": dense()["x"], "s": torch.arange(ROWS) > 3, "u": torch.rand(ROWS, 2, 3), "r": ragged(lengths)},
        batch_size=[ROWS],
    )
    bounds = [0, 5, ROWS] if scattered else [0, ROWS]
    for start, stop in itertools.pairwise(bounds):
        part = {name: data[name][start:stop] for name in "xsu"}
        part["r"] = ragged(lengths[start:stop])
        tq.kv_batch_put(keys()[start:stop], partition, TensorDict(part, batch_size=[stop - start]))
    out = TensorDict(
        {
            "x": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
            "s": torch.zeros(ROWS, dtype=torch.bool),
            "u": torch.zeros(3, 2, ROWS).permute(2, 1, 0),
            "r": torch.nested.nested_tensor_from_jagged(torch.zeros(sum(lengths)), data["r"].offsets()),
        },
        batch_size=[ROWS],
    )
    place = out["x"].data_ptr()
    assert tq.kv_batch_get(keys(), partition, out=out) is out
    assert out["x"].data_ptr() == place
    assert all(torch.equal(out[name], data[name]) for name in "xsu")
    assert torch.equal(out["r"].values(), data["r"].values())
    tq.get_client().clear_partition(partition)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ({"x": torch.zeros(ROWS, 3)}, "no entry for field 'r'"),
        ({"x": torch.zeros(ROWS, 4), "r": ragged(LENGTHS)}, r"field 'x' is torch.float32 \[8, 3\]"),
        ({"x": torch.zeros(ROWS, 3).double(), "r": ragged(LENGTHS)}, "torch.float64"),
        ({"x": torch.zeros(ROWS, 3), "r": torch.zeros(ROWS, 2)}, "differing shapes"),
        ({"x": torch.zeros(ROWS, 3), "r": ragged([1] * ROWS)}, "field 'r'.*lengths"),
        ({"x": torch.zeros(ROWS, 3, device="meta"), "r": ragged(LENGTHS)}, "on meta for field 'x'"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_before_anything_is_written(
    queue: Stack, partition: str, out: dict[str, torch.Tensor], words: str
) -> None:
    data = {"x": torch.ones(ROWS, 3), "r": ragged(LENGTHS)}
    tq.kv_batch_put(keys(), partition, TensorDict(data, batch_size=[ROWS]))
    with pytest.raises(InvalidInputError, match=words):
        tq.kv_batch_get(keys(), partition, out=out)
    assert all(value.is_meta or (not value.is_nested and not value.any()) for value in [out["x"]])


def test_text_has_no_place_in_out(queue: Stack, partition: str) -> None:
    tq.kv_put("k", partition, {"t": "text"})
    with pytest.raises(InvalidInputError, match="field 't' is no tensor"):
        tq.kv_batch_get("k", partition, out={"t": torch.zeros(1)})


async def test_the_awaitable_twins_take_the_same_arguments(queue: Stack, partition: str) -> None:
    data = dense(ROWS, 3)
    meta = await tq.async_kv_batch_put(keys(), partition, data)
    out = {"x": torch.zeros(ROWS, 3, dtype=torch.int64)}
    assert await tq.async_kv_batch_get(keys(), partition, out=out) is out
    assert torch.equal(out["x"], data["x"])
    for batch in (
        await tq.async_kv_batch_get_by_meta(meta, zero_copy=True),
        tq.kv_batch_get_by_meta(meta, device="cpu"),
        await tq.async_kv_batch_get(keys(), partition, device=torch.device("cpu")),
    ):
        assert torch.equal(batch["x"].values().view(ROWS, 3), data["x"])


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nonsense", "vulkan"])
def test_a_device_that_is_not_there_is_refused_by_name(queue: Stack, partition: str, device: str) -> None:
    tq.kv_put("k", partition, {"x": torch.zeros(3)})
    with pytest.raises(InvalidInputError, match=f"device '{device}'"):
        tq.kv_batch_get("k", partition, device=device)


def test_arguments_that_exclude_each_other_are_refused(queue: Stack, partition: str) -> None:
    tq.kv_put("k", partition, {"x": torch.zeros(3)})
    out = {"x": torch.zeros(1, 3)}
    with pytest.raises(InvalidInputError, match="zero_copy"):
        tq.kv_batch_get("k", partition, out=out, zero_copy=True)
    with pytest.raises(InvalidInputError, match="do not pass device"):
        tq.kv_batch_get("k", partition, out=out, device="cpu")
    with pytest.raises(InvalidTypeError, match="out must be"):
        tq.kv_batch_get("k", partition, out=[torch.zeros(1, 3)])  # type: ignore[arg-type]
