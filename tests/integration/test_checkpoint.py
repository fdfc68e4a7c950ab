"""Checkpoints of real queues: while producers run, killed half-way, damaged, into other numbers of units, backends."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.checkpoint_saver import change
from tests.integration.queue_command import QueueCommand
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.checkpoint import save
from transfer_queue.checkpoint.directory import CheckpointDirectory, open_directory
from transfer_queue.checkpoint.files import FileEntry, read_manifest
from transfer_queue.checkpoint.load import load_queue
from transfer_queue.checkpoint.save import save_queue
from transfer_queue.checkpoint.scheduled import save_next
from transfer_queue.checkpoint.series import Series, newest
from transfer_queue.client.operation import Operation
from transfer_queue.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotInitializedError,
    QueueNotEmptyError,
)
from transfer_queue.wire.messages import Capture, EndCapture


@pytest.fixture
def attach() -> Iterator[Callable[[Stack], None]]:
    def attach(stack: Stack) -> None:
        tq.close()
        tq.init({"controller": {"addresses": [stack.address]}})

    yield attach
    tq.close()


def fill(rows: int = 40, width: int = 32) -> None:
    """Partitions of every kind of column, partly consumed, partly cleared, partly overwritten."""
    keys = [f"key {number}" for number in range(rows)]
    data = TensorDict(
        {
            "dense": torch.arange(rows * width, dtype=torch.float32).reshape(rows, width),
            "ragged": torch.nested.as_nested_tensor(
                [torch.arange(number % 5) for number in range(rows)], layout=torch.jagged
            ),
            "scalar": torch.arange(rows),
        },
        [rows],
    )
    tq.kv_batch_put(keys, "kv", data, [{"n": number, "lists": [number]} for number in range(rows)])
    tq.kv_batch_put(keys[::-3], "kv", TensorDict({"scalar": -torch.arange(len(keys[::-3]))}, [len(keys[::-3])]))
    tq.kv_batch_put(keys[:5], "kv", TensorDict({"text": [f"text {number}" for number in range(5)]}, [5]))
    tq.kv_clear(keys[10:13], "kv")
    tq.kv_put("only a tag", "tags", tag={"done": True})
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(20)}, [20]), partition_id="rows")
    client.get_meta(["x"], 7, "rows", task_name="train")


def content() -> Any:
    """All there is to see of the queue."""
    client = tq.get_client()
    found: dict[str, Any] = {"list": tq.kv_list(), "order": [list(keys) for keys in tq.kv_list().values()]}
    for partition, keys in tq.kv_list().items():
        for key in keys:
            if partition != "tags":
                row = tq.kv_batch_get(key, partition)
                found[f"{partition}/{key}"] = {
                    name: value[0].tolist() if isinstance(value, torch.Tensor) else list(value)
                    for name, value in sorted(row.items())
                }
    for partition in client.get_partition_list():
        found[f"{partition} consumed"] = [part.tolist() for part in client.get_consumption_status("train", partition)]
    every = client.get_meta(["x"], 1, "rows", mode="force_fetch")
    found["rows"] = (every.global_indexes, client.get_data(every)["x"].tolist())
    return found


def without_indexes(found: Any) -> Any:
    return {name: value[1] if name == "rows" or name.endswith(" consumed") else value for name, value in found.items()}


def test_everything_comes_back_in_another_number_of_units(tmp_path: Path, attach: Callable[[Stack], None]) -> None:
    with running_stack(units=2, capacity="16Mi") as stack:
        attach(stack)
        fill()
        before = content()
        tq.save_checkpoint(tmp_path / "a" / "saved", metadata={"step": 7})
        with pytest.raises(QueueNotEmptyError, match="'kv': 37"):
            tq.load_checkpoint(tmp_path / "a" / "saved", replace=False)
        assert content() == before
        tq.kv_clear("key 3", "kv")
        tq.kv_put("later", "younger", {"scalar": torch.tensor(1)})
        tq.load_checkpoint(tmp_path / "a" / "saved")
        assert without_indexes(content()) == without_indexes(before)
    about = json.loads((tmp_path / "a" / "saved" / "metadata.json").read_text())
    assert (about["storage_saved"], about["user_metadata"], about["partitions"]) == (True, {"step": 7}, 3)
    with running_stack(units=3, capacity="16Mi") as stack:
        attach(stack)
        tq.load_checkpoint(str(tmp_path / "a" / "saved"))
        assert content() == before
        fresh = tq.get_client().get_meta(["x"], 13, "rows", task_name="train")
        assert tq.get_client().get_data(fresh)["x"].tolist() == list(range(7, 20))
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)
        wait_until(lambda: stack.used() == 0, "storage is freed")


def test_a_save_writes_what_changed_since_the_last_one_and_each_comes_back_byte_for_byte(
    tmp_path: Path, attach: Callable[[Stack], None]
) -> None:
    series = Series(str(tmp_path), "queue")
    keys = [str(number) for number in range(1000)]
    written = []

    def put(keys: list[str], seed: int) -> None:
        values = torch.randn(len(keys), 2048, generator=torch.Generator().manual_seed(seed))
        tq.kv_batch_put(keys, "p", TensorDict({"x": values}, [len(keys)]))

    def save(directory: CheckpointDirectory, former: CheckpointDirectory | None) -> None:
        known = {path for path in tmp_path.rglob("*") if path.is_file()}
        save_queue(tq.get_client(), directory, former=former)
        written.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path not in known))

    def rows() -> torch.Tensor:
        return tq.kv_batch_get(keys, "p", layout="dense")["x"]

    with running_stack(units=2, capacity="32Mi") as stack:
        attach(stack)
        for start in range(0, 1000, 100):
            put(keys[start : start + 100], start)
        save_next(tq.get_client(), series, save)
        first = rows()
        put(keys[::100], 1)
        save_next(tq.get_client(), series, save)
        second = rows()
        save_next(tq.get_client(), series, save)
    assert written[0] > 1000 << 13
    assert 10 << 13 < written[1] < written[0] * 0.02
    assert written[2] < written[0] * 0.01
    with running_stack(units=3, capacity="32Mi") as stack:
        attach(stack)
        for name, expected in zip(series.names(), (first, second, second), strict=True):
            load_queue(tq.get_client(), series.member(name), replace=True)
            assert torch.equal(rows(), expected)
        series.prune(1)
        load_queue(tq.get_client(), newest(str(tmp_path)), replace=True)
        assert torch.equal(rows(), second)
        put(keys, 2)
        save_next(tq.get_client(), series, save)
        series.prune(1)
        assert len(list(tmp_path.iterdir())) == 1, "nothing of the earlier ones is needed any more"


def test_a_checkpoint_of_the_former_format_is_loaded_and_replaced(
    tmp_path: Path, attach: Callable[[Stack], None]
) -> None:
    """It names no block."""
    with running_stack(units=1, capacity="16Mi") as stack:
        attach(stack)
        fill()
        before = content()
        tq.save_checkpoint(tmp_path)
        manifest = read_manifest(open_directory(tmp_path))
        assert manifest.format == 1
        file = tmp_path / manifest.data / "blocks.msgpack"
        places = msgspec.msgpack.encode([place[:5] for place in msgspec.msgpack.decode(file.read_bytes())])
        file.write_bytes(places)
        manifest.files["blocks.msgpack"] = FileEntry(len(places), zlib.crc32(places))
        manifest = msgspec.structs.replace(manifest, crc32=manifest.checksum())
        (tmp_path / "metadata.json").write_bytes(msgspec.json.encode(manifest))
        tq.load_checkpoint(tmp_path)
        assert without_indexes(content()) == without_indexes(before)
        tq.save_checkpoint(tmp_path)
        assert read_manifest(open_directory(tmp_path)).borrowed == []


def test_a_large_block_is_divided_among_small_units(tmp_path: Path, attach: Callable[[Stack], None]) -> None:
    values = torch.arange(3 << 20).reshape(96, 1 << 15)
    with running_stack(units=1, capacity="64Mi") as stack:
        attach(stack)
        tq.kv_batch_put([str(n) for n in range(96)], "p", TensorDict({"x": values}, [96]))
        tq.save_checkpoint(tmp_path)
    with running_stack(units=3, capacity="12Mi") as stack:
        attach(stack)
        tq.load_checkpoint(tmp_path)
        back = tq.kv_batch_get([str(n) for n in range(95, -1, -1)], "p")["x"]
        assert torch.equal(torch.stack(list(back.unbind())), values.flip(0))


SAVE_AND_LOAD = """
import os, torch, transfer_queue as tq
tq.init()
tq.load_checkpoint(os.environ["SAVED"])
print(sorted(tq.get_client().get_partition_list()), tq.kv_batch_get("key 3", "kv")["scalar"].tolist())
print(tq.kv_batch_get("key 39", "kv")["dense"][0, :2].tolist())
tq.save_checkpoint(os.environ["SAVED"])
"""


def test_everything_goes_through_another_backend_and_comes_back(
    tmp_path: Path, attach: Callable[[Stack], None]
) -> None:
    with running_stack(units=1, capacity="16Mi") as stack:
        attach(stack)
        fill()
        before = content()
        scalar, dense = (tq.kv_batch_get(key, "kv") for key in ("key 3", "key 39"))
        tq.save_checkpoint(tmp_path / "saved")
    queue = QueueCommand(tmp_path, {"mooncake": {}})
    queue.environ["SAVED"] = str(tmp_path / "saved")
    done = queue.up(sys.executable, "-c", SAVE_AND_LOAD, timeout_s=100)
    assert done.returncode == 0, done.stderr
    expected = [f"['kv', 'rows', 'tags'] {scalar['scalar'].tolist()}", f"{dense['dense'][0, :2].tolist()}"]
    assert done.stdout.splitlines()[-2:] == expected
    with running_stack(units=1, capacity="16Mi") as stack:
        attach(stack)
        tq.load_checkpoint(tmp_path / "saved")
        assert content() == before


def test_a_checkpoint_is_one_moment_though_producers_go_on(tmp_path: Path, attach: Callable[[Stack], None]) -> None:
    """Each producer writes its step to two keys of two partitions in turn and clears rows that it wrote: whatever is
    saved must be a state that existed, with all of its data."""
    stop = threading.Event()
    failures: list[BaseException] = []
    steps = [0, 0]

    def produce(worker: int, address: str) -> None:
        client = tq.TransferQueueClient(f"producer {worker}", address)
        try:
            while not stop.is_set():
                step = steps[worker] + 1
                for partition in ("first", "second"):
                    fields = {"step": torch.full((2000,), step)}
                    client.run(client.kv.put_one, f"w{worker}", partition, fields, {"step": step}, None)
                passing = {"x": torch.full((2000,), step)}
                client.run(client.kv.put_one, f"passing {worker} {step}", "passing", passing, None, None)
                client.run(client.kv.clear, f"passing {worker} {step - 3}", "passing")
                steps[worker] = step
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            client.close()

    with running_stack(units=2, capacity="32Mi") as stack:
        attach(stack)
        threads = [threading.Thread(target=produce, args=(worker, stack.address)) for worker in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: min(steps) > 3 or failures, "producers produce")
        for number in range(3):
            if number == 1:  # from now on the state takes long to encode
                tq.kv_batch_put(
                    [f"key {row}" for row in range(6000)], "many", tags=[{"row": row} for row in range(6000)]
                )
            began = min(steps)
            tq.save_checkpoint(tmp_path / str(number))
            wait_until(lambda began=began: min(steps) > began or failures, "producers go on")
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not failures
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)
        wait_until(lambda: stack.used() == 0, "what was kept for the saves is freed")
        for number in range(3):
            tq.load_checkpoint(tmp_path / str(number))
            listed = tq.kv_list()
            assert len(listed.get("many", ())) == (6000 if number else 0)
            for worker in range(2):
                tags = [listed[partition][f"w{worker}"]["step"] for partition in ("first", "second")]
                assert tags[0] - tags[1] in (0, 1)
                for partition, step in zip(("first", "second"), tags, strict=True):
                    row = tq.kv_batch_get(f"w{worker}", partition)["step"][0]
                    assert row.tolist() == [step] * 2000
            for key in listed["passing"]:
                assert set(tq.kv_batch_get(key, "passing")["x"][0].tolist()) == {int(key.split()[-1])}
            for partition in listed:
                tq.get_client().clear_partition(partition)


def test_killed_during_a_save_the_previous_checkpoint_stays_valid(
    tmp_path: Path, attach: Callable[[Stack], None]
) -> None:
    saved = tmp_path / "saved"
    chance = random.Random(5)
    with running_stack(units=1, capacity="64Mi") as stack:
        attach(stack)
        fill(2000, 1024)
        change(0)
        used = stack.used()
        for _ in range(3):
            command = [sys.executable, "-m", "tests.integration.checkpoint_saver", stack.address, str(saved)]
            with preloaded.Popen(
                command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
            ) as saver:
                assert saver.stdout is not None
                done = int(saver.stdout.readline())
                halfway = chance.randrange(1, 3 << 20)
                wait_until(lambda halfway=halfway: _written(saved) > halfway, "a save is under way")
                saver.kill()
                done = max([done, *map(int, saver.stdout.read().split())])
            about = json.loads((saved / "metadata.json").read_text())
            assert about["user_metadata"]["count"] in (done, done + 1)
        before = tq.kv_batch_get([f"key {n}" for n in (0, 1999)], "kv", ["scalar"])["scalar"].tolist()
        wait_until(lambda: stack.used() == used, "nothing is kept for the dead")
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)
        wait_until(lambda: stack.used() == 0, "storage is freed")
        tq.load_checkpoint(saved)
        assert tq.kv_batch_get([f"key {n}" for n in (0, 1999)], "kv", ["scalar"])["scalar"].tolist() == before
        tq.save_checkpoint(saved)
    assert sorted(path.name for path in saved.iterdir())[1:] == ["metadata.json"]  # leftovers of the killed are gone


def test_captures_of_one_connection_keep_their_blocks_until_their_own_ends(
    tmp_path: Path, attach: Callable[[Stack], None]
) -> None:
    with running_stack(units=1, capacity="16Mi") as stack:
        attach(stack)
        tq.kv_put("k", "p", {"x": torch.tensor([1])})
        client = tq.get_client()
        engine = client.engine

        def ask(body: Any) -> Any:
            return client.run(Operation, engine.transfer(body, (), 60), lambda payload: payload)

        content = msgspec.msgpack.decode(ask(Capture(token=1)))
        ask(Capture(token=2))
        tq.kv_clear("k", "p")
        ask(EndCapture(token=2))
        fetched = save._read(client, save._present(engine, content["state"], 0))
        assert len(fetched.blocks) == 1
        fetched.release()
        ask(EndCapture(token=1))


def _written(saved: Path) -> int:
    """Bytes of a save that is under way."""
    total = 0
    for folder in saved.glob(".new-*"):
        try:
            total += sum(path.stat().st_size for path in folder.iterdir())
        except FileNotFoundError:
            continue  # it was just renamed
    return total


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    with running_stack(units=1, capacity="16Mi") as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        fill()
        tq.save_checkpoint(folder)
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)
        tq.close()
        yield stack, folder


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def test_a_save_whose_controller_is_gone_does_not_wait_for_it_again(
    attach: Callable[[Stack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_stack(units=1, capacity="16Mi") as stack, ThreadPoolExecutor(1) as pool:
        attach(stack)
        stack.controller.kill()
        monkeypatch.setattr(save, "_END_S", 0.1)
        pool.submit(save._end_captures, tq.get_client(), 1).result(60)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda data, about: _flip(data / "blocks-00000", 200), CorruptCheckpointError, "blocks-00000"),
        (lambda data, about: _flip(data / "blocks-00000", -200), CorruptCheckpointError, "blocks-00000"),
        (lambda data, about: _flip(data / "controller.msgpack", 900), CorruptCheckpointError, "controller.msgpack"),
        (lambda data, about: _flip(data / "blocks.msgpack", 9), CorruptCheckpointError, "blocks.msgpack"),
        (lambda data, about: _flip(about, 30), CheckpointError, "metadata.json"),
        (lambda data, about: about.write_bytes(b""), CorruptCheckpointError, "metadata.json"),
        (lambda data, about: os.truncate(data / "blocks-00000", 640), CorruptCheckpointError, "blocks-00000"),
        (lambda data, about: (data / "blocks-00000").unlink(), FileNotFoundError, "not found.*blocks-00000"),
        (lambda data, about: about.unlink(), CheckpointNotFoundError, "not found.*metadata.json"),
    ],
)
def test_damage_is_named_and_nothing_is_loaded(
    saved: tuple[Stack, Path],
    tmp_path: Path,
    attach: Callable[[Stack], None],
    damage: Callable[[Path, Path], None],
    error: type[Exception],
    message: str,
) -> None:
    stack, folder = saved
    subprocess.run(["cp", "-r", f"{folder}/.", str(tmp_path)], check=True)
    damage(next(tmp_path.glob("data-*")), tmp_path / "metadata.json")
    attach(stack)
    with pytest.raises(error, match=message):
        tq.load_checkpoint(tmp_path)
    assert tq.get_client().get_partition_list() == []
    wait_until(lambda: stack.used() == 0, "what was stored before the damage was found is freed")
    tq.load_checkpoint(folder)
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)


def test_wrong_calls_say_what_is_wrong(
    saved: tuple[Stack, Path], tmp_path: Path, attach: Callable[[Stack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQ_CONTROLLER_ADDRESS", raising=False)
    monkeypatch.delenv("TQ_CONFIG_FILE", raising=False)
    for call in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(NotInitializedError, match="not initialized"):
            call(tmp_path)
    attach(saved[0])
    with pytest.raises(FileNotFoundError, match="not found"):
        tq.load_checkpoint(tmp_path / "nothing")
    for metadata in ([1], {"x": object()}, {"x": float("nan")}):
        with pytest.raises(TypeError, match="metadata"):
            tq.save_checkpoint(tmp_path / "new", metadata=metadata)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot save"):
        tq.save_checkpoint(tmp_path / "file" / "below")
