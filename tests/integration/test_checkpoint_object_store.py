"""Checkpoints in an object store: a real S3 server, real queues."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import transfer_queue as tq
from tests import preloaded
from tests.integration.queue_command import QueueCommand, free_ports
from tests.integration.stack import ROOT, Stack, running_stack
from tests.integration.test_checkpoint import content, fill, without_indexes
from tests.integration.test_tq_checkpoint import run
from tests.waiting import wait_until
from transfer_queue.checkpoint import directory
from transfer_queue.config.running import CHECKPOINT_STATUS, LastCheckpoint, read_report
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, InvalidInputError

URL = "s3://checkpoints/run7/queue"


@pytest.fixture(scope="module")
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """An S3 server with the bucket ``checkpoints``, which the environment names."""
    port = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            wait_until(lambda: _answers(server, port), "the S3 server answers", 60)
            files = fsspec.filesystem("s3")
            files.mkdir("checkpoints")
            yield files
        finally:
            server.kill()
            server.wait()


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    import socket

    assert server.poll() is None
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(autouse=True)
def empty(store: fsspec.AbstractFileSystem) -> None:
    if store.exists("checkpoints/run7"):
        store.rm("checkpoints/run7", recursive=True)


@contextmanager
def attached(units: int) -> Iterator[Stack]:
    with running_stack(units=units, capacity="16Mi") as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        try:
            yield stack
        finally:
            tq.close()


def folders(store: fsspec.AbstractFileSystem) -> set[str]:
    store.invalidate_cache()
    return {path.rpartition("/")[2] for path in store.ls("checkpoints/run7/queue") if "data-" in path}


def test_a_queue_comes_back_in_another_number_of_units(store: fsspec.AbstractFileSystem) -> None:
    with attached(1):
        fill()
        before = content()
        tq.save_checkpoint(URL, metadata={"step": 7})
        first = folders(store)
        tq.save_checkpoint(URL, metadata={"step": 8})
        assert first < folders(store), "the second has the blocks of the first"
    with attached(3):
        tq.load_checkpoint(URL)
        assert content() == before
    assert "is sound and holds" in run("show", URL, "--verify").stdout


def test_a_killed_save_leaves_the_previous_checkpoint(store: fsspec.AbstractFileSystem) -> None:
    saver = str(Path(__file__).with_name("checkpoint_saver.py"))
    with attached(1) as stack:
        fill()
        before = content()
        for kill_after_s in (0.0, 0.05, 0.15):
            process = preloaded.Popen(
                [sys.executable, saver, stack.address, URL],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            with process:
                assert process.stdout is not None
                assert process.stdout.readline() == "0\n"
                threading.Event().wait(kill_after_s)
                process.kill()
            tq.load_checkpoint(URL)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory, "_ABANDONED_S", -10)
            tq.save_checkpoint(URL)
        assert len(folders(store)) == 1, "what the killed saves left is removed"
    with attached(2):
        tq.load_checkpoint(URL)
        found = content()
        assert found["list"]["kv"] == before["list"]["kv"]
        assert found["kv/key 39"] == before["kv/key 39"]


def test_a_young_folder_of_another_save_and_foreign_objects_stay(store: fsspec.AbstractFileSystem) -> None:
    store.pipe_file("checkpoints/run7/queue/data-0123abcd/.transferqueue-checkpoint", b"0123abcd")
    store.pipe_file("checkpoints/run7/queue/data-20260101/notes.txt", b"mine")
    with attached(1):
        tq.kv_put("k", "p", {"x": torch.ones(2)})
        tq.save_checkpoint(URL)
    assert {"data-0123abcd", "data-20260101"} < folders(store)
    assert store.cat_file("checkpoints/run7/queue/data-20260101/notes.txt") == b"mine"


def test_a_damaged_object_is_named(store: fsspec.AbstractFileSystem) -> None:
    with attached(1):
        tq.kv_put("k", "p", {"x": torch.ones(2)})
        tq.save_checkpoint(URL)
        (folder,) = folders(store)
        path = f"checkpoints/run7/queue/{folder}/blocks-00000"
        damaged = bytearray(store.cat_file(path))
        damaged[-1] ^= 1
        store.pipe_file(path, bytes(damaged))
        with pytest.raises(CorruptCheckpointError, match=f"{URL}/{folder}/blocks-00000 is damaged"):
            tq.load_checkpoint(URL)
        store.rm_file(path)
        store.invalidate_cache()
        with pytest.raises(CheckpointNotFoundError, match=f"there is no {URL}/{folder}/blocks-00000"):
            tq.load_checkpoint(URL)


def test_wrong_urls_are_refused_with_the_reason(store: fsspec.AbstractFileSystem) -> None:
    with attached(1):
        with pytest.raises(CheckpointNotFoundError, match=r"s3://checkpoints/elsewhere/metadata\.json"):
            tq.load_checkpoint("s3://checkpoints/elsewhere")
        with pytest.raises(CheckpointError, match="cannot save to s3://no-such-bucket/x: "):
            tq.save_checkpoint("s3://no-such-bucket/x")
        with pytest.raises(InvalidInputError, match=r"'nowhere://x/y' cannot be used: .*nowhere"):
            tq.save_checkpoint("nowhere://x/y")
        with pytest.raises(InvalidInputError, match="pass the URL as a string"):
            tq.save_checkpoint(Path("s3://checkpoints/x"))


def test_saves_at_intervals_keep_the_newest_while_producers_write(store: fsspec.AbstractFileSystem) -> None:
    """The process is killed at some moment; what is loaded is a moment of the stream, in another number of units."""
    series, seen = "checkpoints/run7/series", set()
    command = [sys.executable, "-m", "transfer_queue.cli", "checkpoint", "save", f"s3://{series}"]

    def complete() -> list[str]:
        store.invalidate_cache()
        found = [path.split("/")[3] for path in store.glob(f"{series}/*/metadata.json")]
        seen.update(found)
        return found

    with attached(1) as stack:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TQ_CONTROLLER_ADDRESS": stack.address}
        saver = subprocess.Popen([*command, "--every", "1", "--keep", "2"], env=environ, stdout=subprocess.DEVNULL)
        try:
            put = itertools.count()

            def goes_on() -> bool:
                number = next(put)
                for partition in ("first", "second"):
                    tq.kv_put(str(number), partition, {"x": torch.tensor([number])})
                return bool(complete()) and len(seen) >= 4

            wait_until(goes_on, "the fourth is there", 120)
        finally:
            saver.kill()
            saver.wait()
    assert 1 <= len(complete()) <= 3, "one more while it is exchanged"
    with attached(3):
        tq.load_checkpoint(f"s3://{series}", replace=False)
        first, second = (tq.kv_list().get(partition, {}) for partition in ("first", "second"))
        assert 0 <= len(first) - len(second) <= 1
        assert set(first) == {str(number) for number in range(len(first))}
        assert [int(x) for x in tq.kv_batch_get(list(second), "second")["x"].unbind()] == [int(key) for key in second]


@contextmanager
def brought_up(folder: Path, backend: str | dict[str, Any], **spec: Any) -> Iterator[QueueCommand]:
    """A queue that ``tq up`` keeps and that this process uses."""
    folder.mkdir()
    queue = QueueCommand(folder, {backend: {}} if isinstance(backend, str) else backend)
    for name, value in spec.items():
        queue.resource["spec"][name] = (
            {**queue.resource["spec"].get(name, {}), **value} if name != "restoreFrom" else value
        )
    queue.write()
    started = queue.run("up", "-f", str(queue.file), "--detach")
    try:
        assert started.returncode == 0, started.stderr
        queue.said = started.stderr
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TQ_CONFIG_FILE", str(queue.state / "transferqueue" / "test" / "attach.yaml"))
            tq.init()
            yield queue
    finally:
        tq.close()
        queue.run("down")


def last_checkpoint(queue: QueueCommand) -> LastCheckpoint:
    report = read_report(queue.state / "transferqueue" / "test" / CHECKPOINT_STATUS)
    return (report and report.last) or LastCheckpoint()


def ports(count: int) -> dict[str, int]:
    first = free_ports(2 * count)
    return {"port": first, "metricsPort": first + count}


def test_a_queue_of_tq_up_is_saved_on_schedule_and_starts_in_another_shape_and_backend(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    place = "s3://checkpoints/run7/scheduled"
    policy = [{"name": "job", "namespace": "default", "roles": ["admin", "producer", "consumer"], "partitions": [""]}]
    checkpoint = {"schedule": "1s", "keep": 2, "destination": place}
    with brought_up(tmp_path / "a", "simple", checkpoint=checkpoint, security={"policy": policy}) as queue:
        fill()
        wait_until(lambda: last_checkpoint(queue).url, "a checkpoint is there", 120)
        queue.named("checkpoint.saver").kill()  # it is started again
        tq.kv_put("later", "kv", {"x": torch.arange(5)})
        before, at = content(), datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        wait_until(lambda: last_checkpoint(queue).time > at, "one after the last put is there", 120)
        last = last_checkpoint(queue)
        assert last.url.startswith(f"{place}/")
        assert not last.error
        assert f"checkpoint: {last.rows} rows" in queue.run("status").stdout
        (told,) = json.loads(queue.run("status", "-o", "json").stdout)
        assert told["checkpoint"]["last"]["rows"] == last.rows
    assert "is sound and holds" in run("show", place, "--verify").stdout
    shape = {"controller": {"shards": 2, **ports(2)}, "storage": {"replicas": 3, **ports(3)}}
    with brought_up(tmp_path / "b", "mooncake", restoreFrom=place, **shape) as queue:
        assert f"loaded {last.rows} rows" in queue.said
        assert without_indexes(content()) == without_indexes(before)
        assert not any("checkpoint.saver" in " ".join(process.cmdline()) for process in queue.processes())


def test_a_restore_that_fails_starts_no_queue_and_one_into_rows_changes_nothing(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    place = str(tmp_path / "kept")
    with brought_up(tmp_path / "a", "simple", controller={"durability": "node"}) as queue:
        tq.kv_put("old", "p", {"x": torch.ones(2)})
        tq.save_checkpoint(place)
        tq.kv_put("new", "p", {"x": torch.ones(2)})
        queue.resource["spec"]["restoreFrom"] = place
        queue.write()
        tq.close()
        queue.run("down")
        started = queue.run("up", "-f", str(queue.file), "--detach")
        assert f"{place} was not loaded: the queue is not empty, it has 2 rows" in started.stderr
        tq.init()
        assert list(tq.kv_list("p")["p"]) == ["old", "new"]
        tq.close()
        queue.run("down")
        queue.resource["spec"]["restoreFrom"] = "s3://checkpoints/elsewhere"
        queue.write()
        failed = queue.run("up", "-f", str(queue.file), "--detach")
        assert failed.returncode == 1
        assert "checkpoint did not start: checkpoint not found: there is no s3://checkpoints/elsewhere" in failed.stderr
